// SPDX-License-Identifier: Apache-2.0
#include "models/norm.hpp"

#include <torch/torch.h>

#include <typeinfo>

namespace models {

void Norm::set(torch::nn::AnyModule layer) {
  layer_ = std::move(layer);
  module_ = layer_.ptr();
  auto* batch_norm = dynamic_cast<torch::nn::BatchNorm2dImpl*>(module_.get());
  // A class derived from it has a forward of its own.
  const bool plain = batch_norm != nullptr &&
                     typeid(*batch_norm) == typeid(torch::nn::BatchNorm2dImpl) &&
                     batch_norm->options.affine() && batch_norm->options.track_running_stats() &&
                     batch_norm->options.momentum().has_value();
  batch_norm_ = plain ? batch_norm : nullptr;
  fusable_ = dynamic_cast<ddp::ops::FusableNorm*>(module_.get());
  if (fusable_ != nullptr && !fusable_->fusable_layer()) {
    fusable_ = nullptr;
  }
  tickets_ = torch::Tensor();
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
  return has_layer() ? ddp::ops::batch_norm(input, batch_norm()) : layer_.forward(input);
}

ddp::ops::BatchNormLayer Norm::batch_norm() {
  ddp::ops::BatchNormLayer layer;
  if (batch_norm_ != nullptr) {
    const auto& bn = *batch_norm_;
    layer = {bn.weight,        bn.bias,          bn.running_mean,
             bn.running_var,   bn.is_training(), *bn.options.momentum(),
             bn.options.eps(), fused_,           {}};
  } else {
    layer = *fusable_->fusable_layer();
  }
  layer.fused = fused_;
  // Evaluation needs none: threads may share a module then.
  if (fused_ && layer.training && layer.weight.is_cuda()) {
    if (!tickets_.defined() || tickets_.device() != layer.weight.device()) {
      tickets_ = ddp::ops::batch_norm_tickets(layer.weight);
    }
    layer.tickets = tickets_;
  }
  return layer;
}

torch::Tensor Norm::forward_relu(const torch::Tensor& input) {
  return has_layer() ? ddp::ops::batch_norm_relu(input, batch_norm()) : forward(input).relu_();
}

ddp::ops::Fork Norm::forward_relu_fork(const torch::Tensor& input) {
  if (has_layer()) {
    return ddp::ops::batch_norm_relu_fork(input, batch_norm());
  }
  const auto out = forward(input).relu_();
  return {out, out};
}

ddp::ops::Fork Norm::forward_add_relu(const torch::Tensor& input, const torch::Tensor& residual) {
  if (has_layer()) {
    return ddp::ops::batch_norm_add_relu(input, batch_norm(), residual);
  }
  auto out = forward(input);
  out += residual;
  out.relu_();
  return {out, out};
}

ddp::ops::Fork Norm::forward_add_relu(const torch::Tensor& input, Norm& other,
                                      const torch::Tensor& other_input) {
  if (has_layer() && other.has_layer()) {
    return ddp::ops::batch_norm_add_relu(input, batch_norm(), other_input, other.batch_norm());
  }
  return forward_add_relu(input, other.forward(other_input));
}

ddp::ops::Fork Norm::forward_relu_max_pool(const torch::Tensor& input) {
  if (has_layer()) {
    return ddp::ops::batch_norm_relu_max_pool(input, batch_norm());
  }
  const auto out = torch::max_pool2d(forward(input).relu_(), 3, 2, 1);
  return {out, out};
}

void Norm::append_counter(std::vector<torch::Tensor>& counters) const {
  if (batch_norm_ != nullptr && batch_norm_->is_training()) {
    counters.push_back(batch_norm_->num_batches_tracked);
  } else if (fusable_ != nullptr && fusable_->fusable_layer()->training) {
    counters.push_back(fusable_->batch_counter());
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
