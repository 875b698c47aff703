// SPDX-License-Identifier: Apache-2.0
#include "models/resnet.hpp"

#include <torch/torch.h>

#include <array>
#include <stdexcept>
#include <utility>

#include "ddp/ops/conv2d.hpp"
#include "ddp/ops/pooled_linear.hpp"
#include "ddp/ops/side_task.hpp"
#include "ddp/ops/stem_convolution.hpp"
#include "ddp/ops/wgrad_branch.hpp"

namespace models {
namespace detail {
namespace {

torch::nn::Conv2d conv3x3(int64_t in_channels, int64_t out_channels, int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in_channels, out_channels, 3).stride(stride).padding(1).bias(false));
}

torch::nn::Conv2d conv1x1(int64_t in_channels, int64_t out_channels, int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in_channels, out_channels, 1).stride(stride).bias(false));
}

/// Finds one of an owner's norms by name.
template <typename NormType, std::size_t N>
NormType& select_norm(const std::string& name,
                      const std::array<std::pair<const char*, NormType*>, N>& norms) {
  for (const auto& [candidate, norm] : norms) {
    if (name == candidate) {
      return *norm;
    }
  }
  throw std::invalid_argument("no normalisation layer is called \"" + name + "\" here");
}

/// conv(x); fused: by ddp::ops::conv2d.
torch::Tensor convolve(torch::nn::Conv2d& conv, const torch::Tensor& x, bool fused) {
  if (!fused) {
    return conv->forward(x);
  }
  return ddp::ops::conv2d(x, conv->weight, conv->options.stride()->at(0), conv->weight.size(2) / 2);
}

/// Images as weights of 16 bits read them.
torch::Tensor as_weights(const torch::Tensor& images, const torch::Tensor& weight) {
  const bool half =
      weight.scalar_type() == torch::kBFloat16 || weight.scalar_type() == torch::kHalf;
  return half ? images.to(weight.scalar_type()) : images;
}

// Above this many elements an activation's kernels fill a GPU: nothing is gained beside them.
constexpr int64_t kMaxSideElements = int64_t{1} << 23;
// Likewise for images of more pixels a side.
constexpr int64_t kMaxSideImage = 64;

/// What a block's shortcut carries: the input, or its projection, made beside the branch.
ddp::ops::SideTask start_shortcut(Downsample& downsample, const torch::Tensor& input,
                                  const BlockOptions& options) {
  const bool beside = downsample && options.side_streams && input.numel() <= kMaxSideElements;
  return {input,
          [&](const torch::Tensor& x) {
            return downsample ? convolve(downsample->conv, x, options.fused_ops) : x;
          },
          beside};
}

/// relu(norm(x) + shortcut), a projected shortcut with its own norm.
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
  // Made first and registered last, as in torchvision: it draws its random numbers first.
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

void StageImpl::finish_initialisation() {
  for (const auto& block : blocks_) {
    block->finish_initialisation();
  }
}

}  // namespace detail

ResNetImpl::ResNetImpl(ResNetOptions options, std::vector<int64_t> num_blocks, bool bottleneck)
    : options_(std::move(options)), num_blocks_(std::move(num_blocks)), bottleneck_(bottleneck) {
  if (options_.num_classes < 1) {
    throw std::invalid_argument("ResNetOptions::num_classes = " +
                                std::to_string(options_.num_classes) + ": give at least 1");
  }
  ResNetImpl::reset();
  initialise();
}

void ResNetImpl::reset() {
  const bool cifar = options_.stem == Stem::Cifar;
  conv1_ = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 64, cifar ? 3 : 7)
                                                          .stride(cifar ? 1 : 2)
                                                          .padding(cifar ? 1 : 3)
                                                          .bias(false)));
  bn1_.reset(*this, "bn1", options_.norm, 64, options_.fused_ops);
  stages_.clear();
  int64_t channels = 64;
  for (std::size_t i = 0; i < num_blocks_.size(); ++i) {
    detail::BlockOptions first{.in_channels = channels,
                               .planes = int64_t{64} << i,
                               .stride = i == 0 ? 1 : 2,
                               .norm = options_.norm,
                               .zero_init_residual = options_.zero_init_residual,
                               .fused_ops = options_.fused_ops,
                               .side_streams = options_.side_streams};
    stages_.push_back(register_module("layer" + std::to_string(i + 1),
                                      detail::Stage(first, num_blocks_[i], bottleneck_)));
    channels = stages_.back()->out_channels();
  }
  fc_ = register_module("fc", torch::nn::Linear(channels, options_.num_classes));
}

void ResNetImpl::initialise() {
  // Once more over all convolutions, in torchvision's order, so that equal seeds give equal
  // weights.
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* conv = module->as<torch::nn::Conv2dImpl>()) {
      torch::nn::init::kaiming_normal_(conv->weight, 0.0, torch::kFanOut, torch::kReLU);
    }
  }
  for (auto& stage : stages_) {
    stage->finish_initialisation();
  }
}

torch::Tensor ResNetImpl::forward(const torch::Tensor& input) {
  if (is_training()) {
    std::vector<torch::Tensor> counters;
    bn1_.append_counter(counters);
    for (const auto& stage : stages_) {
      stage->append_counters(counters);
    }
    count_batches(counters);
  }
  const ddp::ops::WgradBranch weight_gradients_beside(options_.side_streams &&
                                                      input.size(-1) <= detail::kMaxSideImage);
  auto x = forward_stem(input);
  for (auto& stage : stages_) {
    x = stage->forward(x);
  }
  if (options_.fused_ops) {
    return ddp::ops::pooled_linear(x.branch, fc_->weight, fc_->bias);
  }
  return fc_->forward(torch::adaptive_avg_pool2d(x.branch, {1, 1}).flatten(1));
}

ddp::ops::Fork ResNetImpl::forward_stem(const torch::Tensor& input) {
  if (options_.stem == Stem::Imagenet) {
    return bn1_.forward_relu_max_pool(
        options_.fused_ops ? ddp::ops::stem_convolution(input, conv1_->weight)
                           : conv1_->forward(detail::as_weights(input, conv1_->weight)));
  }
  const auto out = bn1_.forward_relu(conv1_->forward(detail::as_weights(input, conv1_->weight)));
  return {out, out};
}

std::shared_ptr<torch::nn::Module> ResNetImpl::norm(const std::string& name) const {
  return detail::select_norm<const Norm, 1>(name, {{{"bn1", &bn1_}}}).module();
}

void ResNetImpl::replace_norm(const std::string& name, torch::nn::AnyModule replacement) {
  detail::select_norm<Norm, 1>(name, {{{"bn1", &bn1_}}})
      .replace(*this, name, std::move(replacement));
}

ResNet resnet18(const ResNetOptions& options) {
  return ResNet(options, std::vector<int64_t>{2, 2, 2, 2}, false);
}
ResNet resnet34(const ResNetOptions& options) {
  return ResNet(options, std::vector<int64_t>{3, 4, 6, 3}, false);
}
ResNet resnet50(const ResNetOptions& options) {
  return ResNet(options, std::vector<int64_t>{3, 4, 6, 3}, true);
}
ResNet resnet101(const ResNetOptions& options) {
  return ResNet(options, std::vector<int64_t>{3, 4, 23, 3}, true);
}
ResNet resnet152(const ResNetOptions& options) {
  return ResNet(options, std::vector<int64_t>{3, 8, 36, 3}, true);
}

ResNet make_resnet(const std::string& name, const ResNetOptions& options) {
  using Maker = ResNet (*)(const ResNetOptions&);
  static constexpr std::pair<const char*, Maker> kMakers[] = {{"resnet18", &resnet18},
                                                              {"resnet34", &resnet34},
                                                              {"resnet50", &resnet50},
                                                              {"resnet101", &resnet101},
                                                              {"resnet152", &resnet152}};
  std::string names;
  for (const auto& [candidate, maker] : kMakers) {
    if (name == candidate) {
      return maker(options);
    }
    names += names.empty() ? candidate : std::string(", ") + candidate;
  }
  throw std::invalid_argument("no ResNet is called \"" + name + "\"; there are " + names);
}

}  // namespace models
