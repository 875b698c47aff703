// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"

namespace ddp {

namespace detail {

/// CPU tensors in the order of the file: the header, then the data.
struct SerializedTensors {
  std::string header;
  std::vector<at::Tensor> data;  ///< contiguous
};
/// Requires contiguous CPU tensors.
SerializedTensors serialize_tensors(const TensorMap& tensors,
                                    const std::map<std::string, std::string>& metadata);

/// The format's name of a dtype ("F32"). Throws WriteError naming `name` if there is none.
std::string safetensors_dtype(at::ScalarType dtype, const std::string& name);

}  // namespace detail
}  // namespace ddp
