// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

/// A tensor's place in a file.
struct StoredTensorInfo {
  std::string name;
  std::string dtype;  ///< the format's name: "F32", "BF16", …
  std::vector<int64_t> shape;
  uint64_t offset = 0;  ///< first byte, from the start of the file
  uint64_t num_bytes = 0;
};
/// In the order of the file. Reads and checks the header only. Throws ReadError.
std::vector<StoredTensorInfo> list_safetensors(const std::string& path);

}  // namespace ddp
