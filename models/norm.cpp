// SPDX-License-Identifier: Apache-2.0
#include "models/norm.hpp"

#include <torch/torch.h>

#include <typeinfo>

namespace models {

void Norm::set(torch::nn::AnyModule layer) {
  layer_ = std::move(layer);
  module_ = layer_.ptr();
  auto* batch_norm = dynamic_cast<torch::nn::BatchNorm2dImpl*>(module_.get());
  // A derived class may have its own forward.
  const bool plain = batch_norm != nullptr &&
                     typeid(*batch_norm) == typeid(torch::nn::BatchNorm2dImpl) &&
                     batch_norm->options.affine() && batch_norm->options.track_running_stats();
  batch_norm_ = plain ? batch_norm : nullptr;
  fusable_ = dynamic_cast<ddp::ops::FusableNorm*>(module_.get());
  kernel_counters_ = torch::Tensor();
}

// Users may change the options at any time. Without a momentum the module itself has to average.
bool Norm::is_plain() const {
  return batch_norm_ != nullptr && batch_norm_->options.momentum().has_value();
}

void Norm::reset(torch::nn::Module& owner, const std::string& name, const NormFactory& factory,
                 int64_t num_features, bool fused) {
  fused_ = fused;
  set(factory ? factory(num_features) : torch::nn::AnyModule(torch::nn::BatchNorm2d(num_features)));
  owner.register_module(name, module_);
}

void Norm::replace(torch::nn::Module& owner, const std::string& name, torch::nn::AnyModule layer) {
  set(std::move(layer));
  owner.replace_module(name, module_);
}

torch::Tensor Norm::forward(const torch::Tensor& input) {
  const auto layer = batch_norm();
  return layer ? ddp::ops::batch_norm(input, *layer) : layer_.forward(input);
}

std::optional<ddp::ops::BatchNormLayer> Norm::batch_norm() {
  std::optional<ddp::ops::BatchNormLayer> layer;
  if (is_plain()) {
    const auto& bn = *batch_norm_;
    layer = {bn.weight,        bn.bias,          bn.running_mean,
             bn.running_var,   bn.is_training(), *bn.options.momentum(),
             bn.options.eps(), fused_,           {}};
  } else if (fusable_ != nullptr) {
    layer = fusable_->fusable_layer();
  }
  if (!layer) {
    return layer;
  }
  layer->fused = fused_;
  // Evaluation needs no kernel_counters, so threads may share a module in evaluation.
  if (fused_ && layer->training && layer->weight.is_cuda()) {
    if (!kernel_counters_.defined() || kernel_counters_.device() != layer->weight.device()) {
      kernel_counters_ = ddp::ops::batch_norm_kernel_counters(layer->weight);
    }
    layer->kernel_counters = kernel_counters_;
  }
  return layer;
}

torch::Tensor Norm::forward_relu(const torch::Tensor& input) {
  const auto layer = batch_norm();
  return layer ? ddp::ops::batch_norm_relu(input, *layer) : layer_.forward(input).relu_();
}

ddp::ops::Fork Norm::forward_relu_fork(const torch::Tensor& input) {
  if (const auto layer = batch_norm()) {
    return ddp::ops::batch_norm_relu_fork(input, *layer);
  }
  const auto out = layer_.forward(input).relu_();
  return {out, out};
}

ddp::ops::Fork Norm::forward_add_relu(const torch::Tensor& input, const torch::Tensor& residual) {
  if (const auto layer = batch_norm()) {
    return ddp::ops::batch_norm_add_relu(input, *layer, residual);
  }
  auto out = layer_.forward(input);
  out += residual;
  out.relu_();
  return {out, out};
}

ddp::ops::Fork Norm::forward_add_relu(const torch::Tensor& input, Norm& other,
                                      const torch::Tensor& other_input) {
  const auto layer = batch_norm(), other_layer = other.batch_norm();
  if (layer && other_layer) {
    return ddp::ops::batch_norm_add_relu(input, *layer, other_input, *other_layer);
  }
  return forward_add_relu(input, other.forward(other_input));
}

ddp::ops::Fork Norm::forward_relu_max_pool(const torch::Tensor& input) {
  if (const auto layer = batch_norm()) {
    return ddp::ops::batch_norm_relu_max_pool(input, *layer);
  }
  const auto out = torch::max_pool2d(layer_.forward(input).relu_(), 3, 2, 1);
  return {out, out};
}

void Norm::append_counter(std::vector<torch::Tensor>& counters) const {
  if (is_plain() && batch_norm_->is_training()) {
    counters.push_back(batch_norm_->num_batches_tracked);
  } else if (fusable_ != nullptr) {
    const auto layer = fusable_->fusable_layer();
    if (layer && layer->training) {
      counters.push_back(fusable_->batch_counter());
    }
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
