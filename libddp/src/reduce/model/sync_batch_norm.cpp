// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/sync_batch_norm.hpp"

#include <ATen/ATen.h>
#include <torch/nn/functional/normalization.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/collective_label.hpp"
#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/ops/vision.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/statistics_exchange.hpp"
#include "ops/vision/batch_norm_sync.hpp"

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
    const detail::LabelScope scope(label());
    communicator_->all_gather(all, mine)->wait();
    return all;
  }
  void all_reduce(const at::Tensor& sums) override {
    const detail::LabelScope scope(label());
    communicator_->all_reduce(sums, ReduceOp::Sum)->wait();
  }

 private:
  static const detail::CollectiveLabel& label() {
    static const auto label = detail::make_label("SyncBatchNorm");
    return label;
  }
  CommunicatorPtr communicator_;
};

// Normalizes by the statistics of all ranks' batches. `momentum` gives the new batch's share of the
// running estimates, a scalar of the given dtype and device.
template <typename Momentum>
at::Tensor batch_norm_of_ranks(const at::Tensor& input, const at::Tensor& weight,
                               const at::Tensor& bias, const at::Tensor& running_mean,
                               const at::Tensor& running_var, const Momentum& momentum, double eps,
                               const std::shared_ptr<ops::StatisticsExchange>& exchange) {
  const auto statistics = ops::detail::share_statistics(input, eps, *exchange);
  if (running_mean.defined()) {
    const at::NoGradGuard no_grad;
    const ops::AutocastOff autocast_off(input.device().type());
    ops::detail::move_running(statistics, momentum(statistics.variance.options()), running_mean,
                              running_var);
  }
  return ops::detail::normalise_shared(input, weight, bias, statistics, exchange);
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator,
                                     const torch::nn::BatchNormOptions& options_in)
    : options(options_in), exchange_(std::make_shared<RankExchange>(std::move(communicator))) {
  options.num_features(num_features);
  SyncBatchNormImpl::reset();
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::Module& norm, CommunicatorPtr communicator,
                                     const torch::nn::BatchNormOptions& options_in)
    : options(options_in), exchange_(std::make_shared<RankExchange>(std::move(communicator))) {
  const auto parameters = norm.named_parameters(/*recurse=*/false);
  for (const auto& [name, member] : {std::pair("weight", &weight), std::pair("bias", &bias)}) {
    if (const at::Tensor* tensor = parameters.find(name)) {
      *member = register_parameter(name, *tensor, tensor->requires_grad());
    }
  }
  const auto buffers = norm.named_buffers(/*recurse=*/false);
  for (const auto& [name, member] :
       {std::pair("running_mean", &running_mean), std::pair("running_var", &running_var),
        std::pair("num_batches_tracked", &num_batches_tracked)}) {
    if (const at::Tensor* tensor = buffers.find(name)) {
      *member = register_buffer(name, *tensor);
    }
  }
  train(norm.is_training());
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
  const auto momentum = [&](at::TensorOptions float_options) {
    num_batches_tracked.add_(1);
    return options.momentum().has_value()
               ? at::full({}, *options.momentum(), float_options)
               : num_batches_tracked.to(float_options.dtype()).reciprocal();  // cumulative average
  };
  return batch_norm_of_ranks(input, weight, bias, running_mean, running_var, momentum,
                             options.eps(), exchange_);
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

/// nullptr if `module` is no BatchNorm.
const torch::nn::BatchNormOptions* batch_norm_options(const torch::nn::Module& module) {
  if (const auto* norm = module.as<torch::nn::BatchNorm2dImpl>()) {
    return &norm->options;
  }
  if (const auto* norm = module.as<torch::nn::BatchNorm1dImpl>()) {
    return &norm->options;
  }
  const auto* norm = module.as<torch::nn::BatchNorm3dImpl>();
  return norm != nullptr ? &norm->options : nullptr;
}

bool is_norm_of(const ops::NormOwner& owner, const std::string& name) {
  const auto names = owner.norm_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Runs before any change, so that a model is never half converted.
void check_children(const torch::nn::Module& module, const std::string& path) {
  const bool is_sequential = dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
  const auto* owner = dynamic_cast<const ops::NormOwner*>(&module);
  for (const auto& entry : module.named_children()) {
    const std::string name = path.empty() ? entry.key() : path + "." + entry.key();
    if (batch_norm_options(*entry.value()) == nullptr) {
      check_children(*entry.value(), name);
    } else if (!is_sequential && (owner == nullptr || !is_norm_of(*owner, entry.key()))) {
      throw SettingsError(
          "convert_sync_batchnorm cannot replace the BatchNorm " + name +
          ", a typed member of its module; fix: pass SyncBatchNorm when you build the model "
          "(ResNetOptions::norm), put the norm into a Sequential, or implement "
          "ddp::ops::NormOwner");
    }
  }
}

// aten::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
// cudnn_enabled) of an exported program, over all ranks' batches in training. The program itself
// counts the batches. `is_training` is the module's mode: without running estimates `training` is
// true in evaluation too, which is not collective.
at::Tensor exported_batch_norm(const std::vector<c10::IValue>& arguments, bool is_training,
                               const std::shared_ptr<ops::StatisticsExchange>& exchange) {
  const auto tensor = [&](std::size_t i) {
    return arguments.at(i).isTensor() ? arguments[i].toTensor() : at::Tensor();
  };
  const auto input = tensor(0), weight = tensor(1), bias = tensor(2), mean = tensor(3),
             var = tensor(4);
  const double momentum = arguments.at(6).toDouble(), eps = arguments.at(7).toDouble();
  const bool by_batch = arguments.at(5).toBool();
  if (!by_batch || !(is_training || mean.defined())) {
    return torch::batch_norm(input, weight, bias, mean, var, by_batch, momentum, eps,
                             arguments.at(8).toBool());
  }
  const auto& per_feature = mean.defined() ? mean : weight;
  exchange->check_input(input,
                        per_feature.defined() ? per_feature.numel()
                        : input.dim() < 2     ? 0
                                              : input.size(1),
                        /*training=*/true);
  const auto share = [&](at::TensorOptions float_options) {
    return at::full({}, momentum, float_options);
  };
  return batch_norm_of_ranks(input, weight, bias, mean, var, share, eps, exchange);
}

// What PyTorch's decompositions make of a batch norm. It writes no statistics that could be shared.
void refuse_decomposed_norms(const ExportedModuleImpl& module) {
  for (const char* name :
       {"aten::native_batch_norm", "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit.no_stats", "aten::_native_batch_norm_legit_functional",
        "aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional",
        "aten::_batch_norm_impl_index", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}) {
    if (module.has_operator(name)) {
      throw SettingsError(
          concat("convert_sync_batchnorm: the exported program has ", name,
                 ", which would normalize each rank's batch alone; fix: export without "
                 "run_decompositions()"));
    }
  }
}

void convert_exported(ExportedModuleImpl& module, const CommunicatorPtr& communicator) {
  module.override_operator("aten::batch_norm",
                           [exchange = std::shared_ptr<ops::StatisticsExchange>(
                                std::make_shared<RankExchange>(communicator))](
                               std::vector<c10::IValue>& stack, bool is_training) {
                             auto result = exported_batch_norm(stack, is_training, exchange);
                             stack.clear();
                             stack.emplace_back(std::move(result));
                           });
}

std::vector<ExportedModuleImpl*> exported_modules(torch::nn::Module& module) {
  std::vector<ExportedModuleImpl*> exported;
  if (auto* itself = module.as<ExportedModuleImpl>()) {
    exported.push_back(itself);
  }
  for (const auto& child : module.modules(/*include_self=*/false)) {
    if (auto* inner = child->as<ExportedModuleImpl>()) {
      exported.push_back(inner);
    }
  }
  return exported;
}

/// Replaces the norms of a model, each by one module in all its places.
class Converter {
 public:
  explicit Converter(CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}

  void convert_children(torch::nn::Module& module) {
    auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
    auto* owner = dynamic_cast<ops::NormOwner*>(&module);
    int64_t position = -1;
    for (const auto& entry : module.named_children()) {
      ++position;  // a Sequential's children are in the order of its calls
      const auto twin = twin_of(entry.value());
      if (!twin) {
        convert_children(*entry.value());
      } else if (sequential != nullptr) {
        *(sequential->begin() + position) = torch::nn::AnyModule(twin);
        module.replace_module(entry.key(), twin);
      } else {
        owner->replace_norm(entry.key(), torch::nn::AnyModule(twin));
      }
    }
  }

 private:
  /// nullptr if `norm` is no BatchNorm.
  std::shared_ptr<SyncBatchNormImpl> twin_of(const std::shared_ptr<torch::nn::Module>& norm) {
    const auto* options = batch_norm_options(*norm);
    if (options == nullptr) {
      return nullptr;
    }
    auto& twin = twins_[norm];
    if (!twin) {
      twin = std::make_shared<SyncBatchNormImpl>(*norm, communicator_, *options);
    }
    return twin;
  }

  CommunicatorPtr communicator_;
  /// The keys keep replaced norms alive, so that no other norm gets the address of one.
  std::map<std::shared_ptr<torch::nn::Module>, std::shared_ptr<SyncBatchNormImpl>> twins_;
};

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const CommunicatorPtr& communicator) {
  if (batch_norm_options(module) != nullptr) {
    throw SettingsError(
        "convert_sync_batchnorm: the module is a BatchNorm itself, and the variable that holds it "
        "has a fixed type; fix: make a SyncBatchNorm, or put the norm into a Sequential");
  }
  check_children(module, "");
  const auto exported = exported_modules(module);
  for (const auto* program : exported) {
    refuse_decomposed_norms(*program);
  }
  Converter(communicator).convert_children(module);
  for (auto* program : exported) {
    convert_exported(*program, communicator);
  }
}

}  // namespace ddp
