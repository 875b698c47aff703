// SPDX-License-Identifier: Apache-2.0
#include "models/language_model.hpp"

#include <torch/torch.h>

namespace models {

double LanguageModel::matrix_flops_per_token() const {
  double flops = 0;
  for (const auto& item : named_parameters()) {
    if (item.value().dim() == 2 && is_matrix_product(item.key())) {
      flops +=
          (item.value().requires_grad() ? 6.0 : 4.0) * static_cast<double>(item.value().numel());
    }
  }
  return flops;
}

ddp::ops::LinearCrossEntropyOptions LanguageModel::loss_options(const torch::Tensor& bias) const {
  ddp::ops::LinearCrossEntropyOptions options{.chunk_tokens = computation_.loss_chunk_tokens,
                                              .bias = bias};
  if (is_training()) {
    options.label_smoothing = computation_.label_smoothing;
    options.z_loss = computation_.z_loss;
  }
  return options;
}

}  // namespace models
