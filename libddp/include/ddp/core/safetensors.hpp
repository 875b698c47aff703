// SPDX-License-Identifier: Apache-2.0
// Tensors in the safetensors format (https://github.com/huggingface/safetensors#format). The reader
// refuses headers above 16 MiB or 100,000 entries, gaps or overlaps in the data and duplicate keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace ddp {

/// Tensors by name. Messages about "the first" key follow the order of names.
using TensorMap = std::map<std::string, at::Tensor>;

/// Contents of one file.
struct Safetensors {
  TensorMap tensors;                            ///< on the CPU
  std::map<std::string, std::string> metadata;  ///< the file's __metadata__
};

/// Maps the file and returns CPU tensors over its pages, which stay mapped while a tensor lives.
/// Writing to a tensor does not change the file. Throws ReadError naming file and reason.
Safetensors load_safetensors(const std::string& path);

/// Writes a temporary file, then fsync and rename: `path` is the old or the new file, never a part.
/// The umask sets its permissions. Throws WriteError. Takes any device and strides; dtypes bool,
/// (u)int8..64, half, bfloat16, float, double, float8_e4m3fn, float8_e5m2, complex float.
void save_safetensors(const std::string& path, const TensorMap& tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace ddp
