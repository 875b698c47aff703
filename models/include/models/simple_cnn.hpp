// SPDX-License-Identifier: Apache-2.0
// A small convolutional network for tests, first steps and tiny images.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "ddp/ops/vision.hpp"
#include "models/norm.hpp"

namespace models {

/// Sizes of a SimpleCnn.
struct SimpleCnnOptions {
  int64_t in_channels = 3;  ///< of the images
  std::vector<int64_t> channels = {32, 64,
                                   128};  ///< one stage each; all but the last halve the image
  int64_t num_classes = 10;               ///< width of the logits
  double dropout = 0.0;                   ///< before the classifier
  NormFactory norm = {};                  ///< empty: BatchNorm2d
};

/// Stages of 3x3 convolution, normalisation and ReLU with 2x2 max pooling between them, then the
/// mean over the image and a linear classifier. Input: [batch, in_channels, height, width], with
/// height and width >= 2^(stages - 1). Output: [batch, num_classes]. Children: conv1, bn1, conv2,
/// …, fc.
class SimpleCnnImpl : public torch::nn::Cloneable<SimpleCnnImpl>, public ddp::ops::NormOwner {
 public:
  explicit SimpleCnnImpl(SimpleCnnOptions options = {});  ///< throws without a stage
  void reset() override;
  torch::Tensor forward(torch::Tensor input);                   ///< logits [batch, num_classes]
  const SimpleCnnOptions& options() const { return options_; }  ///< as given to the constructor
  std::vector<std::string> norm_names() const override;
  std::shared_ptr<torch::nn::Module> norm(const std::string& name) const override;  ///< that child
  void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override;

 private:
  std::size_t norm_index(const std::string& name) const;

  SimpleCnnOptions options_;
  std::vector<torch::nn::Conv2d> convs_;
  std::vector<Norm> norms_;
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(SimpleCnn);

}  // namespace models
