// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/sync_batch_norm.hpp"

#include <ATen/ATen.h>
#include <torch/nn/functional/normalization.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>

#include "ddp/core/error.hpp"
#include "ddp/ops/vision.hpp"
#include "ops/autocast_off.hpp"
#include "ops/vision/batch_norm_sync.hpp"
#include "ops/vision/statistics_exchange.hpp"

namespace ddp {
namespace {

class RankExchange : public ops::StatisticsExchange {
 public:
  explicit RankExchange(CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}
  int64_t size() const override { return communicator_->world_size(); }
  const void* group() const override { return communicator_.get(); }
  void check_input(const at::Tensor& input, int64_t num_features, bool training) const override {
    if (input.dim() < 2 || input.size(1) != num_features) {
      throw SettingsError(concat("SyncBatchNorm of ", num_features,
                                 " features got an input of shape ", input.sizes(),
                                 "; fix: give [N, C, ...], where C is the number of features"));
    }
    if (training && size() == 1 && input.numel() / input.size(1) == 1) {
      throw SettingsError(
          concat("SyncBatchNorm needs more than one value per channel to train, got shape ",
                 input.sizes()));
    }
  }
  at::Tensor all_gather(const at::Tensor& mine) override {
    auto all = at::empty({size(), mine.numel()}, mine.options());
    communicator_->all_gather(all, mine)->wait();
    return all;
  }
  void all_reduce(const at::Tensor& sums) override {
    communicator_->all_reduce(sums, ReduceOp::Sum)->wait();
  }

 private:
  CommunicatorPtr communicator_;
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator,
                                     const torch::nn::BatchNormOptions& options_in)
    : options(options_in), exchange_(std::make_shared<RankExchange>(std::move(communicator))) {
  options.num_features(num_features);
  SyncBatchNormImpl::reset();
}

void SyncBatchNormImpl::reset() {
  if (options.affine()) {
    weight = register_parameter("weight", torch::ones({options.num_features()}));
    bias = register_parameter("bias", torch::zeros({options.num_features()}));
  }
  if (options.track_running_stats()) {
    running_mean = register_buffer("running_mean", torch::zeros({options.num_features()}));
    running_var = register_buffer("running_var", torch::ones({options.num_features()}));
    num_batches_tracked = register_buffer("num_batches_tracked", torch::tensor(0, torch::kLong));
  }
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "ddp::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ")";
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  const bool by_batch = is_training() || !running_mean.defined();
  exchange_->check_input(input, options.num_features(), by_batch);
  // Evaluation is not collective. Without running statistics it uses this rank's batch.
  if (!is_training()) {
    return torch::batch_norm(input, weight, bias, running_mean, running_var, by_batch,
                             /*momentum=*/0.0, options.eps(), /*cudnn_enabled=*/true);
  }
  const auto statistics = ops::detail::share_statistics(input, options.eps(), *exchange_);
  if (running_mean.defined()) {
    const at::NoGradGuard no_grad;
    const ops::AutocastOff autocast_off(input.device().type());
    num_batches_tracked.add_(1);
    const auto momentum = options.momentum().has_value()
                              ? at::full({}, *options.momentum(), statistics.variance.options())
                              : num_batches_tracked.to(statistics.variance.scalar_type())
                                    .reciprocal();  // cumulative average
    ops::detail::move_running(statistics, momentum, running_mean, running_var);
  }
  return ops::detail::normalise_shared(input, weight, bias, statistics, exchange_);
}

std::optional<ops::BatchNormLayer> SyncBatchNormImpl::fusable_layer() const {
  if (!options.affine() || !options.track_running_stats() || !options.momentum().has_value()) {
    return std::nullopt;
  }
  ops::BatchNormLayer layer;
  layer.weight = weight, layer.bias = bias;
  layer.running_mean = running_mean, layer.running_var = running_var;
  layer.training = is_training();
  layer.momentum = *options.momentum();
  layer.eps = options.eps();
  layer.exchange = exchange_;
  return layer;
}

namespace {

template <typename BatchNorm>
std::shared_ptr<torch::nn::Module> converted(const std::shared_ptr<torch::nn::Module>& child,
                                             const CommunicatorPtr& communicator) {
  auto norm = std::dynamic_pointer_cast<BatchNorm>(child);
  if (!norm) {
    return nullptr;
  }
  auto replacement = std::make_shared<SyncBatchNormImpl>(norm->options.num_features(), communicator,
                                                         norm->options);
  const auto adopt = [](torch::Tensor& mine, const torch::Tensor& theirs) {
    if (theirs.defined()) {
      mine.set_data(theirs.data());
      mine.set_requires_grad(theirs.requires_grad());
    }
  };
  adopt(replacement->weight, norm->weight);
  adopt(replacement->bias, norm->bias);
  adopt(replacement->running_mean, norm->running_mean);
  adopt(replacement->running_var, norm->running_var);
  adopt(replacement->num_batches_tracked, norm->num_batches_tracked);
  replacement->train(norm->is_training());
  return replacement;
}

std::shared_ptr<torch::nn::Module> sync_twin(const std::shared_ptr<torch::nn::Module>& child,
                                             const CommunicatorPtr& communicator) {
  if (auto twin = converted<torch::nn::BatchNorm2dImpl>(child, communicator)) {
    return twin;
  }
  if (auto twin = converted<torch::nn::BatchNorm1dImpl>(child, communicator)) {
    return twin;
  }
  return converted<torch::nn::BatchNorm3dImpl>(child, communicator);
}

bool is_norm_of(const ops::NormOwner& owner, const std::string& name) {
  const auto names = owner.norm_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Runs before any change, so that a model is never half converted.
void check_children(torch::nn::Module& module, const CommunicatorPtr& communicator,
                    const std::string& path) {
  const bool is_sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module) != nullptr;
  const auto* owner = dynamic_cast<ops::NormOwner*>(&module);
  for (const auto& entry : module.named_children()) {
    const std::string name = path.empty() ? entry.key() : path + "." + entry.key();
    if (!sync_twin(entry.value(), communicator)) {
      check_children(*entry.value(), communicator, name);
    } else if (!is_sequential && (owner == nullptr || !is_norm_of(*owner, entry.key()))) {
      throw SettingsError(
          "convert_sync_batchnorm cannot replace the BatchNorm " + name +
          ", a typed member of its module; fix: pass SyncBatchNorm when you build the model "
          "(ResNetOptions::norm), put the norm into a Sequential, or implement "
          "ddp::ops::NormOwner");
    }
  }
}

void convert_children(torch::nn::Module& module, const CommunicatorPtr& communicator) {
  auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
  auto* owner = dynamic_cast<ops::NormOwner*>(&module);
  int64_t position = -1;
  for (const auto& entry : module.named_children()) {
    ++position;  // a Sequential's children are in the order of its calls
    const auto twin =
        std::static_pointer_cast<SyncBatchNormImpl>(sync_twin(entry.value(), communicator));
    if (!twin) {
      convert_children(*entry.value(), communicator);
    } else if (sequential != nullptr) {
      *(sequential->begin() + position) = torch::nn::AnyModule(twin);
      module.replace_module(entry.key(), twin);
    } else {
      owner->replace_norm(entry.key(), torch::nn::AnyModule(twin));
    }
  }
}

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const CommunicatorPtr& communicator) {
  check_children(module, communicator, "");
  convert_children(module, communicator);
}

}  // namespace ddp
