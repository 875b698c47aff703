// SPDX-License-Identifier: Apache-2.0
// Residual blocks and stages.
#include "models/resnet.hpp"

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <utility>

#include "ddp/ops/vision.hpp"
#include "norm_by_name.hpp"
#include "ops/streams/side_streams.hpp"

namespace models::detail {
namespace {

torch::nn::Conv2d conv3x3(int64_t in_channels, int64_t out_channels, int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in_channels, out_channels, 3).stride(stride).padding(1).bias(false));
}

torch::nn::Conv2d conv1x1(int64_t in_channels, int64_t out_channels, int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in_channels, out_channels, 1).stride(stride).bias(false));
}

/// conv(x), by ddp::ops::conv2d if `fused`.
torch::Tensor convolve(torch::nn::Conv2d& conv, const torch::Tensor& x, bool fused) {
  if (!fused) {
    return conv->forward(x);
  }
  return ddp::ops::conv2d(x, conv->weight, conv->options.stride()->at(0), conv->weight.size(2) / 2);
}

/// A block's shortcut: the input, or its projection, which overlaps the branch.
class Shortcut {
 public:
  Shortcut(Downsample& downsample, const torch::Tensor& input, bool fused)
      : downsample_(downsample), input_(input) {
    if (downsample_) {
      projection_.emplace(
          input, [&](const torch::Tensor& x) { return convolve(downsample_->conv, x, fused); });
    }
  }
  /// relu(norm(x) + shortcut); a projection has its own norm.
  ddp::ops::Fork add_relu(Norm& norm, const torch::Tensor& x) {
    return projection_ ? norm.forward_add_relu(x, downsample_->bn, projection_->wait())
                       : norm.forward_add_relu(x, input_);
  }

 private:
  Downsample& downsample_;
  const torch::Tensor& input_;
  std::optional<ddp::ops::SideTask> projection_;
};

}  // namespace

Downsample make_downsample(const BlockOptions& options, int64_t out_channels) {
  if (options.stride == 1 && options.in_channels == out_channels) {
    return Downsample(nullptr);
  }
  return Downsample(options, out_channels);
}

DownsampleImpl::DownsampleImpl(BlockOptions options, int64_t out_channels)
    : options_(std::move(options)), out_channels_(out_channels) {
  DownsampleImpl::reset();
}

void DownsampleImpl::reset() {
  conv = register_module("0", conv1x1(options_.in_channels, out_channels_, options_.stride));
  bn.reset(*this, "1", options_.norm, out_channels_, options_.fused_ops);
}

std::shared_ptr<torch::nn::Module> DownsampleImpl::norm(const std::string& name) const {
  return select_norm<const Norm, 1>(name, {{{"1", &bn}}}).module();
}

void DownsampleImpl::replace_norm(const std::string& name, torch::nn::AnyModule replacement) {
  select_norm<Norm, 1>(name, {{{"1", &bn}}}).replace(*this, name, std::move(replacement));
}

BasicBlockImpl::BasicBlockImpl(BlockOptions options) : options_(std::move(options)) {
  BasicBlockImpl::reset();
}

void BasicBlockImpl::reset() {
  const auto& o = options_;
  // torchvision draws the downsample's random numbers first but registers it last.
  downsample_ = make_downsample(o, o.planes * kExpansion);
  conv1_ = register_module("conv1", conv3x3(o.in_channels, o.planes, o.stride));
  bn1_.reset(*this, "bn1", o.norm, o.planes, o.fused_ops);
  conv2_ = register_module("conv2", conv3x3(o.planes, o.planes));
  bn2_.reset(*this, "bn2", o.norm, o.planes, o.fused_ops);
  if (downsample_) {
    register_module("downsample", downsample_);
  }
}

ddp::ops::Fork BasicBlockImpl::forward(const ddp::ops::Fork& input) {
  const bool fused = options_.fused_ops;
  Shortcut shortcut(downsample_, input.shortcut, fused);
  const auto out = bn1_.forward_relu(convolve(conv1_, input.branch, fused));
  return shortcut.add_relu(bn2_, convolve(conv2_, out, fused));
}

void BasicBlockImpl::append_counters(std::vector<torch::Tensor>& counters) const {
  bn1_.append_counter(counters);
  bn2_.append_counter(counters);
  if (downsample_) {
    downsample_->bn.append_counter(counters);
  }
}

void BasicBlockImpl::finish_initialisation() {
  if (options_.zero_init_residual) {
    bn2_.zero_weight();
  }
}

std::shared_ptr<torch::nn::Module> BasicBlockImpl::norm(const std::string& name) const {
  return select_norm<const Norm, 2>(name, {{{"bn1", &bn1_}, {"bn2", &bn2_}}}).module();
}

void BasicBlockImpl::replace_norm(const std::string& name, torch::nn::AnyModule replacement) {
  select_norm<Norm, 2>(name, {{{"bn1", &bn1_}, {"bn2", &bn2_}}})
      .replace(*this, name, std::move(replacement));
}

BottleneckImpl::BottleneckImpl(BlockOptions options) : options_(std::move(options)) {
  BottleneckImpl::reset();
}

void BottleneckImpl::reset() {
  const auto& o = options_;
  const int64_t out_channels = o.planes * kExpansion;
  downsample_ = make_downsample(o, out_channels);  // first, as in BasicBlock
  conv1_ = register_module("conv1", conv1x1(o.in_channels, o.planes));
  bn1_.reset(*this, "bn1", o.norm, o.planes, o.fused_ops);
  conv2_ = register_module("conv2", conv3x3(o.planes, o.planes, o.stride));
  bn2_.reset(*this, "bn2", o.norm, o.planes, o.fused_ops);
  conv3_ = register_module("conv3", conv1x1(o.planes, out_channels));
  bn3_.reset(*this, "bn3", o.norm, out_channels, o.fused_ops);
  if (downsample_) {
    register_module("downsample", downsample_);
  }
}

ddp::ops::Fork BottleneckImpl::forward(const ddp::ops::Fork& input) {
  const bool fused = options_.fused_ops;
  Shortcut shortcut(downsample_, input.shortcut, fused);
  auto out = bn1_.forward_relu(convolve(conv1_, input.branch, fused));
  out = bn2_.forward_relu(convolve(conv2_, out, fused));
  return shortcut.add_relu(bn3_, convolve(conv3_, out, fused));
}

void BottleneckImpl::append_counters(std::vector<torch::Tensor>& counters) const {
  bn1_.append_counter(counters);
  bn2_.append_counter(counters);
  bn3_.append_counter(counters);
  if (downsample_) {
    downsample_->bn.append_counter(counters);
  }
}

void BottleneckImpl::finish_initialisation() {
  if (options_.zero_init_residual) {
    bn3_.zero_weight();
  }
}

std::shared_ptr<torch::nn::Module> BottleneckImpl::norm(const std::string& name) const {
  return select_norm<const Norm, 3>(name, {{{"bn1", &bn1_}, {"bn2", &bn2_}, {"bn3", &bn3_}}})
      .module();
}

void BottleneckImpl::replace_norm(const std::string& name, torch::nn::AnyModule replacement) {
  select_norm<Norm, 3>(name, {{{"bn1", &bn1_}, {"bn2", &bn2_}, {"bn3", &bn3_}}})
      .replace(*this, name, std::move(replacement));
}

StageImpl::StageImpl(BlockOptions first, int64_t num_blocks, bool bottleneck)
    : first_(std::move(first)), num_blocks_(num_blocks), bottleneck_(bottleneck) {
  StageImpl::reset();
}

int64_t StageImpl::out_channels() const {
  return first_.planes * (bottleneck_ ? BottleneckImpl::kExpansion : BasicBlockImpl::kExpansion);
}

template <typename BlockImpl>
void StageImpl::add_blocks() {
  auto options = first_;
  for (int64_t i = 0; i < num_blocks_; ++i) {
    auto block = std::make_shared<BlockImpl>(options);
    register_module(std::to_string(i), block);
    blocks_.push_back(block);
    options.in_channels = out_channels();
    options.stride = 1;
  }
}

void StageImpl::reset() {
  blocks_.clear();
  if (bottleneck_) {
    add_blocks<BottleneckImpl>();
  } else {
    add_blocks<BasicBlockImpl>();
  }
  convs3x3_.clear();
  for (const auto& module : modules(/*include_self=*/false)) {
    auto conv = std::dynamic_pointer_cast<torch::nn::Conv2dImpl>(module);
    if (conv && conv->weight.size(2) == 3) {
      convs3x3_.push_back(std::move(conv));
    }
  }
}

ddp::ops::Fork StageImpl::forward(ddp::ops::Fork input) {
  // The kernels of larger activations fill a GPU, so overlapping them gains nothing.
  constexpr int64_t kMaxElements = int64_t{1} << 23;
  const ddp::ops::SideStreams streams(input.branch.numel() <= kMaxElements);
  for (const auto& block : blocks_) {
    input = block->forward(input);
  }
  return input;
}

void StageImpl::append_counters(std::vector<torch::Tensor>& counters) const {
  for (const auto& block : blocks_) {
    block->append_counters(counters);
  }
}

void StageImpl::prefetch_filters(int64_t& height, int64_t& width) const {
  for (const auto& conv : convs3x3_) {
    const int64_t stride = conv->options.stride()->at(0);
    ddp::ops::prefetch_filter(conv->weight, stride, height, width);
    height = (height - 1) / stride + 1;
    width = (width - 1) / stride + 1;
  }
}

void StageImpl::finish_initialisation() {
  for (const auto& block : blocks_) {
    block->finish_initialisation();
  }
}

}  // namespace models::detail
