// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/sync_batch_norm.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <algorithm>

#include "ddp/core/error.hpp"
#include "ddp/ops/autocast_off.hpp"
#include "ddp/ops/norm_owner.hpp"

namespace ddp {
namespace {

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) {
    dims.push_back(d);
  }
  return dims;
}

at::Tensor as_channels(const at::Tensor& vector, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = vector.numel();
  return vector.view(shape);
}

at::ScalarType statistics_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Statistics {
  at::Tensor mean, invstd, count;  // [C], [C], [1], over all ranks
};

// This rank's sums, gathered: row r of the result is [mean, variance, count] of rank r. A rank
// without input sends zeros and joins all the same.
at::Tensor gather_moments(const at::Tensor& input, Communicator& communicator) {
  const auto dtype = statistics_dtype(input);
  const int64_t channels = input.size(1);
  const auto dims = all_but_channels(input);
  auto mine = at::zeros({2 * channels + 1}, input.options().dtype(dtype));
  if (input.numel() > 0) {
    const auto x = input.to(dtype);
    mine.narrow(0, 0, channels).copy_(x.mean(dims));
    mine.narrow(0, channels, channels).copy_(x.var(dims, /*unbiased=*/false));
    mine.narrow(0, 2 * channels, 1).fill_(static_cast<double>(input.numel() / channels));
  }
  auto all = at::empty({communicator.world_size() * mine.numel()}, mine.options());
  communicator.all_gather(all, mine)->wait();
  return all.view({communicator.world_size(), mine.numel()});
}

// The concatenation's moments: means weigh by count, and the spread between the ranks' means adds
// to the variance. All on the device.
Statistics merge_moments(const at::Tensor& all, int64_t channels, double eps,
                         at::Tensor& variance) {
  const auto means = all.narrow(1, 0, channels);
  const auto variances = all.narrow(1, channels, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);
  const auto total = counts.sum(0).clamp_min(1);
  const auto mean = (means * counts).sum(0) / total;
  variance = ((variances + (means - mean).square()) * counts).sum(0) / total;
  return {mean, (variance + eps).rsqrt(), total};
}

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& invstd,
                            const at::Tensor& total,
                            const std::shared_ptr<Communicator>& communicator) {
    ctx->save_for_backward({input, weight, mean, invstd, total});
    ctx->saved_data["has_bias"] = bias.defined();
    // The communicator is no IValue; the context keeps it through a capsule.
    ctx->saved_data["communicator"] =
        c10::IValue::make_capsule(c10::make_intrusive<CommunicatorHolder>(communicator));
    auto scale = invstd;
    if (weight.defined()) {
      scale = scale * weight;
    }
    const auto dtype = invstd.scalar_type();
    auto output = (input.to(dtype) - as_channels(mean, input)) * as_channels(scale, input);
    if (bias.defined()) {
      output = output + as_channels(bias.to(dtype), input);
    }
    return output.to(input.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& input = saved[0];
    const auto& weight = saved[1];
    const auto& mean = saved[2];
    const auto& invstd = saved[3];
    const auto& total = saved[4];
    const ops::AutocastOff autocast_off(input.device().type());
    const auto capsule = ctx->saved_data["communicator"].toCapsule();
    auto& communicator = *static_cast<CommunicatorHolder*>(capsule.get())->communicator;

    const auto dtype = invstd.scalar_type();
    const auto dims = all_but_channels(input);
    const auto dy = grads[0].to(dtype);
    const auto centred = input.to(dtype) - as_channels(mean, input);
    auto sums = at::stack({dy.sum(dims), (dy * centred).sum(dims)});
    const auto dweight = sums[1] * invstd;
    const auto dbias = sums[0].clone();
    communicator.all_reduce(sums, ReduceOp::Sum)->wait();

    auto scale = invstd;
    if (weight.defined()) {
      scale = scale * weight;
    }
    const auto mean_dy = sums[0] / total;
    const auto projection = invstd.square() * sums[1] / total;
    const auto dx = (dy - as_channels(mean_dy, input) - centred * as_channels(projection, input)) *
                    as_channels(scale, input);
    return {dx.to(input.scalar_type()),
            weight.defined() ? dweight.to(weight.scalar_type()) : at::Tensor(),
            ctx->saved_data["has_bias"].toBool() ? dbias : at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }

 private:
  struct CommunicatorHolder : torch::CustomClassHolder {
    explicit CommunicatorHolder(std::shared_ptr<Communicator> communicator_in)
        : communicator(std::move(communicator_in)) {}
    std::shared_ptr<Communicator> communicator;
  };
};

// The running estimates take the unbiased variance over all ranks.
void update_running(const torch::nn::BatchNormOptions& options,
                    const at::Tensor& num_batches_tracked, const Statistics& statistics,
                    const at::Tensor& variance, at::Tensor running_mean, at::Tensor running_var) {
  const at::NoGradGuard no_grad;
  const auto unbiased = variance * (statistics.count / (statistics.count - 1).clamp_min(1));
  at::Tensor factor;
  if (options.momentum().has_value()) {
    factor = at::full({}, *options.momentum(), variance.options());
  } else {  // cumulative average
    factor = num_batches_tracked.to(variance.scalar_type()).reciprocal();
  }
  running_mean.add_((statistics.mean - running_mean) * factor);
  running_var.add_((unbiased - running_var) * factor);
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator,
                                     const torch::nn::BatchNormOptions& options_in)
    : options(options_in), communicator_(std::move(communicator)) {
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
  if (input.dim() < 2 || input.size(1) != options.num_features()) {
    throw SettingsError(detail::concat("SyncBatchNorm of ", options.num_features(),
                                       " features got an input of shape ", input.sizes(),
                                       ": it takes [N, C, ...] with C the number of features"));
  }
  if (!is_training() && running_mean.defined()) {
    return torch::batch_norm(input, weight, bias, running_mean, running_var, /*training=*/false,
                             /*momentum=*/0.0, options.eps(), /*cudnn_enabled=*/true);
  }
  Statistics statistics;
  {
    const at::NoGradGuard no_grad;
    const ops::AutocastOff autocast_off(input.device().type());
    at::Tensor variance;
    statistics = merge_moments(gather_moments(input, *communicator_), input.size(1), options.eps(),
                               variance);
    if (communicator_->world_size() == 1 && input.numel() / input.size(1) == 1) {
      throw SettingsError(detail::concat(
          "SyncBatchNorm needs more than one value a channel to train, got ", input.sizes()));
    }
    if (is_training() && running_mean.defined()) {
      num_batches_tracked.add_(1);
      update_running(options, num_batches_tracked, statistics, variance, running_mean, running_var);
    }
  }
  const ops::AutocastOff autocast_off(input.device().type());
  return SyncBatchNormFunction::apply(input, weight, bias, statistics.mean, statistics.invstd,
                                      statistics.count, communicator_);
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

// Before anything is changed: a model must not be left half converted.
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
          ", a typed member of its module: build the model with SyncBatchNorm through a norm "
          "factory, hold it in a Sequential, or let the module implement ddp::ops::NormOwner");
    }
  }
}

void convert_children(torch::nn::Module& module, const CommunicatorPtr& communicator) {
  auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
  auto* owner = dynamic_cast<ops::NormOwner*>(&module);
  int64_t position = -1;
  for (const auto& entry : module.named_children()) {
    ++position;  // in a Sequential children stand in the order of its calls
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
