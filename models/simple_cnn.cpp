// SPDX-License-Identifier: Apache-2.0
#include "models/simple_cnn.hpp"

#include <torch/torch.h>

#include <stdexcept>

namespace models {

SimpleCnnImpl::SimpleCnnImpl(SimpleCnnOptions options) : options_(std::move(options)) {
  if (options_.channels.empty() || options_.num_classes < 1 || options_.dropout < 0.0 ||
      options_.dropout >= 1.0) {
    throw std::invalid_argument(
        "SimpleCnnOptions: give at least one entry in channels, num_classes >= 1 and 0 <= dropout "
        "< 1");
  }
  SimpleCnnImpl::reset();
}

void SimpleCnnImpl::reset() {
  convs_.clear();
  norms_.assign(options_.channels.size(), Norm());
  int64_t channels = options_.in_channels;
  for (std::size_t i = 0; i < options_.channels.size(); ++i) {
    const auto number = std::to_string(i + 1);
    auto conv = torch::nn::Conv2dOptions(channels, options_.channels[i], 3).padding(1).bias(false);
    convs_.push_back(register_module("conv" + number, torch::nn::Conv2d(conv)));
    norms_[i].reset(*this, "bn" + number, options_.norm, options_.channels[i]);
    channels = options_.channels[i];
  }
  fc_ = register_module("fc", torch::nn::Linear(channels, options_.num_classes));
}

torch::Tensor SimpleCnnImpl::forward(torch::Tensor input) {
  std::vector<torch::Tensor> counters;
  for (const auto& norm : norms_) {
    norm.append_counter(counters);
  }
  count_batches(counters);
  for (std::size_t i = 0; i < convs_.size(); ++i) {
    if (i > 0) {
      input = torch::max_pool2d(input, /*kernel_size=*/2);
    }
    input = norms_[i].forward(convs_[i]->forward(input)).relu_();
  }
  input = torch::adaptive_avg_pool2d(input, {1, 1}).flatten(1);
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
