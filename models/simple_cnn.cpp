// SPDX-License-Identifier: Apache-2.0
#include "models/simple_cnn.hpp"

#include <torch/torch.h>

#include <array>
#include <stdexcept>

#include "models/precision.hpp"

namespace models {
namespace {

using torch::nn::AnyModule;

template <typename Conv, typename Options>
AnyModule make_conv(int64_t inputs, int64_t outputs, int64_t kernel_size) {
  return AnyModule(
      Conv(Options(inputs, outputs, kernel_size).padding(kernel_size / 2).bias(false)));
}

AnyModule make_conv(int64_t num_dims, int64_t inputs, int64_t outputs, int64_t kernel_size) {
  using namespace torch::nn;
  const auto make = num_dims == 1   ? make_conv<Conv1d, Conv1dOptions>
                    : num_dims == 2 ? make_conv<Conv2d, Conv2dOptions>
                                    : make_conv<Conv3d, Conv3dOptions>;
  return make(inputs, outputs, kernel_size);
}

NormFactory batch_norm(int64_t num_dims) {
  return [num_dims](int64_t channels) {
    return num_dims == 1   ? AnyModule(torch::nn::BatchNorm1d(channels))
           : num_dims == 2 ? AnyModule(torch::nn::BatchNorm2d(channels))
                           : AnyModule(torch::nn::BatchNorm3d(channels));
  };
}

torch::Tensor halve(const torch::Tensor& input, int64_t num_dims) {
  return num_dims == 1   ? torch::max_pool1d(input, /*kernel_size=*/2)
         : num_dims == 2 ? torch::max_pool2d(input, /*kernel_size=*/2)
                         : torch::max_pool3d(input, /*kernel_size=*/2);
}

torch::Tensor mean_over_positions(const torch::Tensor& input, int64_t num_dims) {
  static constexpr std::array<int64_t, 3> kLast = {-1, -2, -3};
  return input.mean(at::IntArrayRef(kLast.data(), static_cast<std::size_t>(num_dims)));
}

}  // namespace

SimpleCnnImpl::SimpleCnnImpl(SimpleCnnOptions options) : options_(std::move(options)) {
  const auto& o = options_;
  if (o.channels.empty() || o.num_classes < 1 || o.dropout < 0.0 || o.dropout >= 1.0 ||
      o.num_dims < 1 || o.num_dims > 3 || o.kernel_size < 1 || o.kernel_size % 2 == 0) {
    throw std::invalid_argument(
        "SimpleCnnOptions: give at least one entry in channels, num_classes >= 1, 0 <= dropout < "
        "1, num_dims of 1, 2 or 3, and an odd kernel_size");
  }
  SimpleCnnImpl::reset();
}

void SimpleCnnImpl::reset() {
  const auto& o = options_;
  convs_.clear();
  norms_.assign(o.channels.size(), Norm());
  int64_t channels = o.in_channels;
  for (std::size_t i = 0; i < o.channels.size(); ++i) {
    const auto number = std::to_string(i + 1);
    convs_.push_back(make_conv(o.num_dims, channels, o.channels[i], o.kernel_size));
    register_module("conv" + number, convs_.back().ptr());
    norms_[i].reset(*this, "bn" + number, o.norm ? o.norm : batch_norm(o.num_dims), o.channels[i]);
    channels = o.channels[i];
  }
  fc_ = register_module("fc", torch::nn::Linear(channels, o.num_classes));
}

torch::Tensor SimpleCnnImpl::forward(torch::Tensor input) {
  std::vector<torch::Tensor> counters;
  for (const auto& norm : norms_) {
    norm.append_counter(counters);
  }
  count_batches(counters);
  input = as_weights(input, fc_->weight);
  for (std::size_t i = 0; i < convs_.size(); ++i) {
    if (i > 0) {
      input = halve(input, options_.num_dims);
    }
    input = norms_[i].forward(convs_[i].forward(input)).relu_();
  }
  input = mean_over_positions(input, options_.num_dims);
  if (options_.dropout > 0.0) {
    input = torch::dropout(input, options_.dropout, is_training());
  }
  return fc_->forward(input);
}

std::vector<std::string> SimpleCnnImpl::norm_names() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < norms_.size(); ++i) {
    names.push_back("bn" + std::to_string(i + 1));
  }
  return names;
}

std::size_t SimpleCnnImpl::norm_index(const std::string& name) const {
  const auto names = norm_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) {
      return i;
    }
  }
  throw std::invalid_argument("there is no normalisation layer called \"" + name + "\"");
}

std::shared_ptr<torch::nn::Module> SimpleCnnImpl::norm(const std::string& name) const {
  return norms_[norm_index(name)].module();
}

void SimpleCnnImpl::replace_norm(const std::string& name, torch::nn::AnyModule replacement) {
  norms_[norm_index(name)].replace(*this, name, std::move(replacement));
}

}  // namespace models
