// SPDX-License-Identifier: Apache-2.0
#include "models/language_model.hpp"

#include <torch/torch.h>

#include "ddp/detail/model_weights.hpp"

namespace models {

// arrange_weights() reads the values: a copy to the host must be complete.
void LanguageModel::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking && !device.is_cpu());
  arrange_weights();
}

void LanguageModel::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  arrange_weights();
}

void LanguageModel::to(torch::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking && !device.is_cpu());
  arrange_weights();
}

void LanguageModel::load(torch::serialize::InputArchive& archive) {
  torch::nn::Module::load(archive);
  arrange_weights();
}

void LanguageModel::arrange_weights() {
  auto head = head_weight();  // the handle shares the parameter
  ddp::ops::pad_rows(head);
}

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
