// SPDX-License-Identifier: Apache-2.0
#include "models/norm.hpp"

#include <torch/torch.h>

namespace models {

void Norm::set(torch::nn::AnyModule layer) {
  layer_ = std::move(layer);
  module_ = layer_.ptr();
  auto* batch_norm = dynamic_cast<torch::nn::BatchNorm2dImpl*>(module_.get());
  const bool plain = batch_norm != nullptr && batch_norm->options.affine() &&
                     batch_norm->options.track_running_stats() &&
                     batch_norm->options.momentum().has_value();
  batch_norm_ = plain ? batch_norm : nullptr;
}

void Norm::reset(torch::nn::Module& owner, const std::string& name, const NormFactory& factory,
                 int64_t num_features) {
  set(factory ? factory(num_features) : torch::nn::AnyModule(torch::nn::BatchNorm2d(num_features)));
  owner.register_module(name, module_);
}

void Norm::replace(torch::nn::Module& owner, const std::string& name, torch::nn::AnyModule layer) {
  set(std::move(layer));
  owner.replace_module(name, module_);
}

torch::Tensor Norm::forward(const torch::Tensor& input) {
  if (batch_norm_ == nullptr) {
    return layer_.forward(input);
  }
  const auto& bn = *batch_norm_;
  return torch::batch_norm(input, bn.weight, bn.bias, bn.running_mean, bn.running_var,
                           bn.is_training(), *bn.options.momentum(), bn.options.eps(),
                           at::globalContext().userEnabledCuDNN());
}

void Norm::append_counter(std::vector<torch::Tensor>& counters) const {
  if (batch_norm_ != nullptr && batch_norm_->is_training()) {
    counters.push_back(batch_norm_->num_batches_tracked);
  }
}

void Norm::zero_weight() {
  const auto parameters = module_->named_parameters(/*recurse=*/false);
  if (const auto* weight = parameters.find("weight")) {
    torch::nn::init::zeros_(*weight);
  }
}

void count_batches(const std::vector<torch::Tensor>& counters) {
  if (!counters.empty()) {
    torch::NoGradGuard no_grad;
    torch::_foreach_add_(counters, 1);
  }
}

}  // namespace models
