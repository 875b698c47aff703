// SPDX-License-Identifier: Apache-2.0
// Tensors in the safetensors format, read and written without Python and without pickle.
// Format: https://github.com/huggingface/safetensors#format. What is written here loads with
// safetensors.torch.load_file and the reverse.
//
// The reader trusts nothing: header at most 16 MiB and 100,000 entries, every length checked
// against the file before memory is taken, data covered without gap or overlap, no key twice.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace ddp {

/// Tensors by name. Iteration, and so every message about "the first" key, is in order of names.
using TensorMap = std::map<std::string, at::Tensor>;

struct Safetensors {
  TensorMap tensors;
  std::map<std::string, std::string> metadata;  ///< the file's __metadata__
};

/// Maps the file and returns CPU tensors over its pages (private: writing to them does not change
/// the file). The pages stay mapped while a tensor lives. Throws ReadError naming file and reason.
Safetensors load_safetensors(const std::string& path);

/// Writes a file of the rights that the umask leaves: under a temporary name, fsync, then rename,
/// so that `path` is the old or the new file, never a part. Tensors of any device and strides;
/// dtypes bool, (u)int8..64, half, bfloat16, float, double, float8_e4m3fn, float8_e5m2, complex
/// float. Throws WriteError.
void save_safetensors(const std::string& path, const TensorMap& tensors,
                      const std::map<std::string, std::string>& metadata = {});

namespace detail {

/// A CPU tensor map as it will lie in a file: the header, then the tensors in order.
struct SerializedTensors {
  std::string header;
  std::vector<at::Tensor> data;  ///< contiguous
};
/// Tensors must be contiguous and on the CPU.
SerializedTensors serialize_tensors(const TensorMap& tensors,
                                    const std::map<std::string, std::string>& metadata);

/// The format's word for a dtype ("F32"); throws WriteError naming `name` where it has none.
std::string safetensors_dtype(at::ScalarType dtype, const std::string& name);

}  // namespace detail
}  // namespace ddp
