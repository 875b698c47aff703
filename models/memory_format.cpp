// SPDX-License-Identifier: Apache-2.0
#include "models/memory_format.hpp"

#include <torch/torch.h>

namespace models {

void to_channels_last(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  const auto convert = [](torch::Tensor tensor) {
    if (tensor.dim() == 4) {
      tensor.set_data(tensor.contiguous(at::MemoryFormat::ChannelsLast));
    }
  };
  for (auto& parameter : module.parameters()) {
    convert(parameter);
  }
  for (auto& buffer : module.buffers()) {
    convert(buffer);
  }
}

}  // namespace models
