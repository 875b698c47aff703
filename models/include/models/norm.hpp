// SPDX-License-Identifier: Apache-2.0
// Normalisation layers that are chosen when a model is built and can be replaced later.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/detail/fusable_norm.hpp"
#include "ddp/ops/vision.hpp"

namespace models {

/// Makes the normalisation of `num_features` channels. The module's forward takes and returns one
/// tensor [batch, channels, height, width]. An empty function means BatchNorm2d.
///
///   models::resnet50({.norm = [&](int64_t c) {
///     return torch::nn::AnyModule(ddp::SyncBatchNorm(c, communicator)); }});
using NormFactory = std::function<torch::nn::AnyModule(int64_t num_features)>;

/// A normalisation child of a model, together with the op that follows it.
///
/// BatchNorm2d and every ops::FusableNorm (SyncBatchNorm) run without type erasure, by the fused
/// ops of ddp/ops/vision.hpp. They do not count their batches: the model increments all
/// counters in one launch (count_batches), where PyTorch launches one per layer. Any other layer
/// runs unchanged, followed by ATen's ops.
class Norm {
 public:
  /// Registers a new layer with `owner` under `name`; call it in Module::reset(). `fused` false
  /// selects ATen's ops for all layers.
  void reset(torch::nn::Module& owner, const std::string& name, const NormFactory& factory,
             int64_t num_features, bool fused = true);
  /// Replaces the layer registered with `owner` under `name`.
  void replace(torch::nn::Module& owner, const std::string& name, torch::nn::AnyModule layer);

  /// norm(input); [batch, channels, height, width], as all inputs and results here
  torch::Tensor forward(const torch::Tensor& input);
  /// relu(norm(input))
  torch::Tensor forward_relu(const torch::Tensor& input);
  /// relu(norm(input)) with two readers
  ddp::ops::Fork forward_relu_fork(const torch::Tensor& input);
  /// relu(norm(input) + residual)
  ddp::ops::Fork forward_add_relu(const torch::Tensor& input, const torch::Tensor& residual);
  /// relu(norm(input) + other(other_input))
  ddp::ops::Fork forward_add_relu(const torch::Tensor& input, Norm& other,
                                  const torch::Tensor& other_input);
  /// max_pool2d(relu(norm(input)), kernel 3, stride 2, padding 1)
  ddp::ops::Fork forward_relu_max_pool(const torch::Tensor& input);
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }  ///< the layer
  /// Appends num_batches_tracked if the model has to increment it.
  void append_counter(std::vector<torch::Tensor>& counters) const;
  /// Zeroes the layer's weight, if it has one.
  void zero_weight();

 private:
  void set(torch::nn::AnyModule layer);
  bool is_plain() const;
  /// nullopt if the layer's own forward has to compute it.
  std::optional<ddp::ops::BatchNormLayer> batch_norm();

  torch::nn::AnyModule layer_;
  std::shared_ptr<torch::nn::Module> module_;
  torch::nn::BatchNorm2dImpl* batch_norm_ = nullptr;  // module_, if it is a plain BatchNorm2d
  ddp::ops::FusableNorm* fusable_ = nullptr;          // module_, if it is an ops::FusableNorm
  bool fused_ = true;
  torch::Tensor kernel_counters_;  // the kernels' counters, not part of the model's state
};

/// Adds one to every counter. No host synchronisation.
void count_batches(const std::vector<torch::Tensor>& counters);

}  // namespace models
