// SPDX-License-Identifier: Apache-2.0
#include "models/resnet.hpp"

#include <torch/torch.h>

#include <stdexcept>
#include <utility>

#include "ddp/ops/vision.hpp"
#include "models/precision.hpp"
#include "norm_by_name.hpp"
#include "ops/streams/side_streams.hpp"

namespace models {

ResNetImpl::ResNetImpl(ResNetOptions options, std::vector<int64_t> num_blocks, bool bottleneck)
    : options_(std::move(options)), num_blocks_(std::move(num_blocks)), bottleneck_(bottleneck) {
  if (options_.num_classes < 1 || options_.in_channels < 1) {
    throw std::invalid_argument(
        "ResNetOptions::num_classes = " + std::to_string(options_.num_classes) +
        ", in_channels = " + std::to_string(options_.in_channels) + ": give at least 1");
  }
  if (num_blocks_.size() != 4) {
    throw std::invalid_argument("ResNet: num_blocks has " + std::to_string(num_blocks_.size()) +
                                " entries: give one for each of the four stages");
  }
  ResNetImpl::reset();
  initialise();
}

void ResNetImpl::reset() {
  const bool cifar = options_.stem == Stem::Cifar;
  const auto stem = torch::nn::Conv2dOptions(options_.in_channels, 64, cifar ? 3 : 7)
                        .stride(cifar ? 1 : 2)
                        .padding(cifar ? 1 : 3)
                        .bias(false);
  conv1_ = register_module("conv1", torch::nn::Conv2d(stem));
  bn1_.reset(*this, "bn1", options_.norm, 64, options_.fused_ops);
  stages_.clear();
  int64_t channels = 64;
  for (std::size_t i = 0; i < num_blocks_.size(); ++i) {
    detail::BlockOptions first{.in_channels = channels,
                               .planes = int64_t{64} << i,
                               .stride = i == 0 ? 1 : 2,
                               .norm = options_.norm,
                               .zero_init_residual = options_.zero_init_residual,
                               .fused_ops = options_.fused_ops};
    stages_.push_back(register_module("layer" + std::to_string(i + 1),
                                      detail::Stage(first, num_blocks_[i], bottleneck_)));
    channels = stages_.back()->out_channels();
  }
  fc_ = register_module("fc", torch::nn::Linear(channels, options_.num_classes));
}

void ResNetImpl::initialise() {
  // Initialises all convolutions again in torchvision's order, so that equal seeds give equal
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
  auto x = forward_stem(input);
  {
    ddp::ops::SideStreams streams(options_.side_streams);
    x = stages_[0]->forward(x);
    start_side_work(streams, x.branch);
    for (std::size_t i = 1; i < stages_.size(); ++i) {
      x = stages_[i]->forward(x);
    }
  }
  return forward_head(x.branch);
}

// Neither depends on a layer. Both overlap the second stage, because the first one's kernels fill
// the GPU.
void ResNetImpl::start_side_work(ddp::ops::SideStreams& streams, const torch::Tensor& x) const {
  std::vector<torch::Tensor> counters;
  bn1_.append_counter(counters);
  for (const auto& stage : stages_) {
    stage->append_counters(counters);
  }
  if (!counters.empty()) {
    streams.start(x.device(), [&] { count_batches(counters); });
  }
  if (options_.fused_ops) {
    int64_t height = x.size(2), width = x.size(3);
    for (std::size_t i = 1; i < stages_.size(); ++i) {
      stages_[i]->prefetch_filters(height, width);
    }
  }
}

ddp::ops::Fork ResNetImpl::forward_stem(const torch::Tensor& input) {
  const bool fused = options_.fused_ops && options_.in_channels == 3;
  const auto out = fused ? ddp::ops::stem_convolution(input, conv1_->weight)
                         : conv1_->forward(as_weights(input, conv1_->weight));
  if (options_.stem == Stem::Imagenet) {
    return bn1_.forward_relu_max_pool(out);
  }
  return bn1_.forward_relu_fork(out);
}

torch::Tensor ResNetImpl::forward_head(const torch::Tensor& x) {
  if (options_.fused_ops) {
    return ddp::ops::pooled_linear(x, fc_->weight, fc_->bias);
  }
  return fc_->forward(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
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
