// SPDX-License-Identifier: Apache-2.0
// A small convolutional network for waveforms, tiny images and volumes.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "ddp/ops/vision.hpp"
#include "models/norm.hpp"

namespace models {

/// Sizes of a SimpleCnn.
struct SimpleCnnOptions {
  int64_t in_channels = 3;  ///< of the input
  std::vector<int64_t> channels = {32, 64,
                                   128};  ///< one stage each; all but the last halve the input
  int64_t num_classes = 10;               ///< width of the output: classes, or values to predict
  double dropout = 0.0;                   ///< before the last layer
  NormFactory norm = {};                  ///< empty: BatchNorm1d, 2d or 3d
  int64_t num_dims = 2;                   ///< 1: waveforms and spectra, 2: images, 3: volumes
  int64_t kernel_size = 3;                ///< of the convolutions in each dimension, odd
};

/// Stages of convolution, normalisation and ReLU with max pooling of 2 between them, then the mean
/// over all positions and a linear layer. Input: [batch, in_channels, length], [batch, in_channels,
/// height, width] or [batch, in_channels, depth, height, width], with each extent >=
/// 2^(stages - 1). Output: [batch, num_classes]. Weights of 16 bits (to_half_but_norms) cast the
/// input to their dtype. Children: conv1, bn1, conv2, …, fc. On CUDA LibTorch has no deterministic
/// backward of the pooling of volumes.
class SimpleCnnImpl : public torch::nn::Cloneable<SimpleCnnImpl>, public ddp::ops::NormOwner {
 public:
  explicit SimpleCnnImpl(SimpleCnnOptions options = {});  ///< throws std::invalid_argument
  void reset() override;
  torch::Tensor forward(torch::Tensor input);                   ///< [batch, num_classes]
  const SimpleCnnOptions& options() const { return options_; }  ///< as given to the constructor
  std::vector<std::string> norm_names() const override;
  std::shared_ptr<torch::nn::Module> norm(const std::string& name) const override;  ///< that child
  void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override;

 private:
  std::size_t norm_index(const std::string& name) const;

  SimpleCnnOptions options_;
  std::vector<torch::nn::AnyModule> convs_;
  std::vector<Norm> norms_;
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(SimpleCnn);

}  // namespace models
