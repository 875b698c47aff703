// SPDX-License-Identifier: Apache-2.0
#include "ops/vision/batch_norm_sync.hpp"

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <optional>
#include <vector>

#include "ops/shared/autocast_off.hpp"
#include "ops/shared/statistics_exchange.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops::detail {
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

// Row r of the result is [mean, variance, count] of process r. A process without input sends zeros.
at::Tensor gather_moments(const at::Tensor& input, StatisticsExchange& exchange) {
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
  return exchange.all_gather(mine);
}

struct ExchangeHolder : torch::CustomClassHolder {
  explicit ExchangeHolder(std::shared_ptr<StatisticsExchange> exchange_in)
      : exchange(std::move(exchange_in)) {}
  std::shared_ptr<StatisticsExchange> exchange;
};

class SharedBatchNorm : public torch::autograd::Function<SharedBatchNorm> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight_in,
                            const std::optional<at::Tensor>& bias_in,
                            const SharedStatistics& statistics,
                            const std::shared_ptr<StatisticsExchange>& exchange) {
    const at::Tensor weight = weight_in.value_or(at::Tensor());
    const at::Tensor bias = bias_in.value_or(at::Tensor());
    const auto& [mean, variance, invstd, count] = statistics;
    ctx->save_for_backward({input, weight, mean, invstd, count});
    ctx->saved_data["has_bias"] = bias.defined();
    keep_exchange(ctx, exchange);
    const auto scale = weight.defined() ? invstd * weight : invstd;
    const auto dtype = invstd.scalar_type();
    auto output = (input.to(dtype) - as_channels(mean, input)) * as_channels(scale, input);
    if (bias.defined()) {
      output = output + as_channels(bias.to(dtype), input);
    }
    return output.to(input.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    check_differentiated_once("batch_norm");
    const auto saved = ctx->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const auto &mean = saved[2], &invstd = saved[3], &count = saved[4];
    const AutocastOff autocast_off(input.device().type());
    const auto dtype = invstd.scalar_type();
    const auto dims = all_but_channels(input);
    const auto dy = grads[0].to(dtype);
    const auto centred = input.to(dtype) - as_channels(mean, input);
    auto sums = at::stack({dy.sum(dims), (dy * centred).sum(dims)});
    const auto dweight = sums[1] * invstd;
    const auto dbias = sums[0].clone();
    kept_exchange(ctx)->all_reduce(sums);

    const auto scale = weight.defined() ? invstd * weight : invstd;
    const auto mean_dy = sums[0] / count;
    const auto projection = invstd.square() * sums[1] / count;
    const auto dx = (dy - as_channels(mean_dy, input) - centred * as_channels(projection, input)) *
                    as_channels(scale, input);
    return {dx.to(input.scalar_type()),
            weight.defined() ? dweight.to(weight.scalar_type()) : at::Tensor(),
            ctx->saved_data["has_bias"].toBool() ? dbias : at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

SharedStatistics share_statistics(const at::Tensor& input, double eps,
                                  StatisticsExchange& exchange) {
  const at::NoGradGuard no_grad;
  const AutocastOff autocast_off(input.device().type());
  const int64_t channels = input.size(1);
  const auto all = gather_moments(input, exchange);
  // Statistics of the concatenated batch: means are weighted by count, and the spread of the
  // processes' means adds to the variance.
  const auto means = all.narrow(1, 0, channels);
  const auto variances = all.narrow(1, channels, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);
  const auto count = counts.sum(0);
  const auto divisor = count.clamp_min(1);
  const auto mean = (means * counts).sum(0) / divisor;
  const auto variance = ((variances + (means - mean).square()) * counts).sum(0) / divisor;
  return {mean, variance, (variance + eps).rsqrt(), count};
}

at::Tensor normalise_shared(const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, const SharedStatistics& statistics,
                            const std::shared_ptr<StatisticsExchange>& exchange) {
  const AutocastOff autocast_off(input.device().type());
  // An undefined tensor is no argument of an autograd function.
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return SharedBatchNorm::apply(input, optional(weight), optional(bias), statistics, exchange);
}

at::Tensor shared_batch_norm(const at::Tensor& x, const BatchNormLayer& bn) {
  const auto statistics = share_statistics(x, bn.eps, *bn.exchange);
  {
    const at::NoGradGuard no_grad;
    move_running(statistics, bn.momentum, bn.running_mean, bn.running_var);
  }
  return normalise_shared(x, bn.weight, bn.bias, statistics, bn.exchange);
}

void keep_exchange(torch::autograd::AutogradContext* ctx,
                   const std::shared_ptr<StatisticsExchange>& exchange) {
  if (exchange) {
    ctx->saved_data["exchange"] =
        c10::IValue::make_capsule(c10::make_intrusive<ExchangeHolder>(exchange));
  }
}

StatisticsExchange* kept_exchange(torch::autograd::AutogradContext* ctx) {
  const auto found = ctx->saved_data.find("exchange");
  return found == ctx->saved_data.end()
             ? nullptr
             : static_cast<ExchangeHolder*>(found->second.toCapsule().get())->exchange.get();
}

}  // namespace ddp::ops::detail
