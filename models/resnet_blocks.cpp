// SPDX-License-Identifier: Apache-2.0
// Residual blocks and stages.
#include "models/resnet.hpp"

#include <torch/torch.h>

#include <optional>
#include <utility>

#include "ddp/ops/vision.hpp"
#include "norm_by_name.hpp"
#include "ops/streams/filters_ahead.hpp"
#include "ops/streams/side_task.hpp"
#include "ops/streams/wgrad_branch.hpp"

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

/// Adds `conv` and updates `image` to its output size.
void add_filter(ddp::ops::FiltersAhead& filters, const torch::nn::Conv2d& conv, ImageSize& image) {
  const int64_t stride = conv->options.stride()->at(0);
  filters.add(conv->weight, stride, image.height, image.width);
  image.shrink(stride);
}

// The kernels of larger activations fill a GPU, so overlapping them gains nothing.
constexpr int64_t kMaxSideElements = int64_t{1} << 23;

/// Starts the block's shortcut: the input, or its projection, which overlaps the main branch.
ddp::ops::SideTask start_shortcut(Downsample& downsample, const torch::Tensor& input,
                                  const BlockOptions& options) {
  const bool beside = downsample && options.side_streams && input.numel() <= kMaxSideElements;
  return {input,
          [&](const torch::Tensor& x) {
            return downsample ? convolve(downsample->conv, x, options.fused_ops) : x;
          },
          beside};
}

/// relu(norm(x) + shortcut); a projected shortcut has its own norm.
ddp::ops::Fork end_block(const torch::Tensor& x, Norm& norm, Downsample& downsample,
                         ddp::ops::SideTask& shortcut) {
  if (downsample) {
    return norm.forward_add_relu(x, downsample->bn, shortcut.wait());
  }
  return norm.forward_add_relu(x, shortcut.wait());
}

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
  auto shortcut = start_shortcut(downsample_, input.shortcut, options_);
  const auto out = bn1_.forward_relu(convolve(conv1_, input.branch, options_.fused_ops));
  return end_block(convolve(conv2_, out, options_.fused_ops), bn2_, downsample_, shortcut);
}

void BasicBlockImpl::append_counters(std::vector<torch::Tensor>& counters) const {
  bn1_.append_counter(counters);
  bn2_.append_counter(counters);
  if (downsample_) {
    downsample_->bn.append_counter(counters);
  }
}

void BasicBlockImpl::add_filters(ddp::ops::FiltersAhead& filters, ImageSize& image) const {
  add_filter(filters, conv1_, image);
  add_filter(filters, conv2_, image);
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
  auto shortcut = start_shortcut(downsample_, input.shortcut, options_);
  auto out = bn1_.forward_relu(convolve(conv1_, input.branch, options_.fused_ops));
  out = bn2_.forward_relu(convolve(conv2_, out, options_.fused_ops));
  return end_block(convolve(conv3_, out, options_.fused_ops), bn3_, downsample_, shortcut);
}

void BottleneckImpl::append_counters(std::vector<torch::Tensor>& counters) const {
  bn1_.append_counter(counters);
  bn2_.append_counter(counters);
  bn3_.append_counter(counters);
  if (downsample_) {
    downsample_->bn.append_counter(counters);
  }
}

void BottleneckImpl::add_filters(ddp::ops::FiltersAhead& filters, ImageSize& image) const {
  for (const auto& conv : {conv1_, conv2_, conv3_}) {
    add_filter(filters, conv, image);
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
}

ddp::ops::Fork StageImpl::forward(ddp::ops::Fork input) {
  std::optional<ddp::ops::WgradBranch> weight_gradients_in_line;
  if (input.branch.numel() > kMaxSideElements) {
    weight_gradients_in_line.emplace(false);
  }
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

void StageImpl::add_filters(ddp::ops::FiltersAhead& filters, ImageSize& image) const {
  for (const auto& block : blocks_) {
    block->add_filters(filters, image);
  }
}

void StageImpl::finish_initialisation() {
  for (const auto& block : blocks_) {
    block->finish_initialisation();
  }
}

}  // namespace models::detail
