// SPDX-License-Identifier: Apache-2.0
// ResNet-18/34/50/101/152 (He et al., arXiv:1512.03385; the stride sits on the 3x3 convolution,
// "v1.5").
//
// Numerics, initialisation (including the order of random draws) and the names of all parameters
// and buffers are torchvision's. Weights can be exchanged both ways.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/ops/vision.hpp"
#include "models/norm.hpp"

namespace ddp::ops {
class SideStreams;
}

namespace models {

/// The layers before the stages.
enum class Stem {
  Imagenet,  ///< 7x7 convolution of stride 2 and a 3x3 max pool of stride 2
  Cifar,     ///< 3x3 convolution of stride 1, no pool: for 32-pixel images
};

/// The defaults are torchvision's.
struct ResNetOptions {
  int64_t num_classes = 1000;       ///< width of the logits
  int64_t in_channels = 3;          ///< of the images
  Stem stem = Stem::Imagenet;       ///< for the images' size
  NormFactory norm = {};            ///< empty: BatchNorm2d
  bool zero_init_residual = false;  ///< each block starts as the identity (arXiv:1706.02677)
  bool fused_ops = true;  ///< false: only ATen's ops (convolutions, BatchNorm2d, sum, ReLU, pools)
  /// On CUDA, where activations are small: shortcut convolutions and, with fused_ops, weight
  /// gradients run on side streams (ops/streams/side_streams.hpp). Results are the same.
  bool side_streams = false;
};

namespace detail {

struct BlockOptions {
  int64_t in_channels = 64;
  int64_t planes = 64;
  int64_t stride = 1;
  NormFactory norm = {};
  bool zero_init_residual = false;
  bool fused_ops = true;
};

/// Interface that a stage needs of its blocks.
class ResidualBlock {
 public:
  virtual ~ResidualBlock() = default;
  virtual ddp::ops::Fork forward(const ddp::ops::Fork& input) = 0;
  virtual void append_counters(std::vector<torch::Tensor>& counters) const = 0;
  virtual void finish_initialisation() = 0;
};

/// The projection on a block's shortcut: convolution "0", normalisation "1". The block calls both.
class DownsampleImpl : public torch::nn::Cloneable<DownsampleImpl>, public ddp::ops::NormOwner {
 public:
  DownsampleImpl(BlockOptions options, int64_t out_channels);
  void reset() override;
  std::vector<std::string> norm_names() const override { return {"1"}; }
  std::shared_ptr<torch::nn::Module> norm(const std::string& name) const override;
  void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override;

  torch::nn::Conv2d conv{nullptr};
  Norm bn;

 private:
  BlockOptions options_;
  int64_t out_channels_;
};
TORCH_MODULE(Downsample);

/// Two 3x3 convolutions (ResNet-18 and 34).
class BasicBlockImpl : public torch::nn::Cloneable<BasicBlockImpl>,
                       public ResidualBlock,
                       public ddp::ops::NormOwner {
 public:
  static constexpr int64_t kExpansion = 1;
  explicit BasicBlockImpl(BlockOptions options);
  void reset() override;
  ddp::ops::Fork forward(const ddp::ops::Fork& input) override;
  void append_counters(std::vector<torch::Tensor>& counters) const override;
  void finish_initialisation() override;
  std::vector<std::string> norm_names() const override { return {"bn1", "bn2"}; }
  std::shared_ptr<torch::nn::Module> norm(const std::string& name) const override;
  void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override;

 private:
  BlockOptions options_;
  torch::nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  Norm bn1_, bn2_;
  Downsample downsample_{nullptr};
};

/// 1x1, 3x3 (with the stride), 1x1 to four times the planes (ResNet-50, 101 and 152).
class BottleneckImpl : public torch::nn::Cloneable<BottleneckImpl>,
                       public ResidualBlock,
                       public ddp::ops::NormOwner {
 public:
  static constexpr int64_t kExpansion = 4;
  explicit BottleneckImpl(BlockOptions options);
  void reset() override;
  ddp::ops::Fork forward(const ddp::ops::Fork& input) override;
  void append_counters(std::vector<torch::Tensor>& counters) const override;
  void finish_initialisation() override;
  std::vector<std::string> norm_names() const override { return {"bn1", "bn2", "bn3"}; }
  std::shared_ptr<torch::nn::Module> norm(const std::string& name) const override;
  void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override;

 private:
  BlockOptions options_;
  torch::nn::Conv2d conv1_{nullptr}, conv2_{nullptr}, conv3_{nullptr};
  Norm bn1_, bn2_, bn3_;
  Downsample downsample_{nullptr};
};

/// Blocks of one resolution, named "0", "1", ….
class StageImpl : public torch::nn::Cloneable<StageImpl> {
 public:
  StageImpl(BlockOptions first, int64_t num_blocks, bool bottleneck);
  void reset() override;
  ddp::ops::Fork forward(ddp::ops::Fork input);
  void append_counters(std::vector<torch::Tensor>& counters) const;
  /// Prefetches the filters for an input of height x width, which becomes the output's size.
  void prefetch_filters(int64_t& height, int64_t& width) const;
  void finish_initialisation();
  int64_t out_channels() const;

 private:
  template <typename BlockImpl>
  void add_blocks();

  BlockOptions first_;
  int64_t num_blocks_;
  bool bottleneck_;
  std::vector<std::shared_ptr<ResidualBlock>> blocks_;
  std::vector<std::shared_ptr<torch::nn::Conv2dImpl>> convs3x3_;  // in order; strides sit on them
};
TORCH_MODULE(Stage);

}  // namespace detail

/// Input [batch, in_channels, height, width], output logits [batch, num_classes]. The output keeps
/// the input's memory format: give channels_last images to a model of channels_last weights
/// (to_channels_last). Weights of 16 bits (to_half_but_norms) cast the images to their dtype, and
/// logits have it too.
class ResNetImpl : public torch::nn::Cloneable<ResNetImpl>, public ddp::ops::NormOwner {
 public:
  /// `num_blocks` of the four stages; `bottleneck` selects the kind of block.
  ResNetImpl(ResNetOptions options, std::vector<int64_t> num_blocks, bool bottleneck);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& input);         ///< logits [batch, num_classes]
  const ResNetOptions& options() const { return options_; }  ///< as given to the constructor
  std::vector<std::string> norm_names() const override { return {"bn1"}; }
  std::shared_ptr<torch::nn::Module> norm(const std::string& name) const override;  ///< that child
  void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override;

 private:
  void initialise();
  ddp::ops::Fork forward_stem(const torch::Tensor& input);
  torch::Tensor forward_head(const torch::Tensor& x);
  /// Counts the batch and prefetches filters; `x` is the second stage's input.
  void start_side_work(ddp::ops::SideStreams& streams, const torch::Tensor& x) const;

  ResNetOptions options_;
  std::vector<int64_t> num_blocks_;
  bool bottleneck_;
  torch::nn::Conv2d conv1_{nullptr};
  Norm bn1_;
  std::vector<detail::Stage> stages_;
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(ResNet);

ResNet resnet18(const ResNetOptions& options = {});   ///< 11.7M parameters with 1000 classes
ResNet resnet34(const ResNetOptions& options = {});   ///< 21.8M
ResNet resnet50(const ResNetOptions& options = {});   ///< 25.6M
ResNet resnet101(const ResNetOptions& options = {});  ///< 44.5M
ResNet resnet152(const ResNetOptions& options = {});  ///< 60.2M
/// Selects by name, "resnet18" … "resnet152"; throws std::invalid_argument that lists the names.
ResNet make_resnet(const std::string& name, const ResNetOptions& options = {});

}  // namespace models
