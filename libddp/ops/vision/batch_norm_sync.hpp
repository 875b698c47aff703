// SPDX-License-Identifier: Apache-2.0
// BatchNorm over the batches of several processes by ATen's ops: the definition, and the fallback
// without kernels.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <memory>

#include "ddp/ops/vision.hpp"
#include "ops/shared/statistics_exchange.hpp"

namespace ddp::ops::detail {

/// Statistics over the batches of all processes, on the device.
struct SharedStatistics {
  at::Tensor mean, variance, invstd, count;  ///< [C] biased, [C], [C]; [1]
};

/// Statistics of `input` [N, C, ...], N may be 0. Merges means and variances after Chan et al.
/// Collective.
SharedStatistics share_statistics(const at::Tensor& input, double eps,
                                  StatisticsExchange& exchange);

/// Updates running estimates as at::batch_norm, by `momentum` (a number or a 0-dim tensor). Does
/// nothing if no process has rows.
template <typename Momentum>
void move_running(const SharedStatistics& statistics, const Momentum& momentum,
                  at::Tensor running_mean, at::Tensor running_var) {
  const auto& count = statistics.count;
  const auto unbiased = statistics.variance * (count / (count - 1).clamp_min(1));
  const auto share = (count > 0).to(count.scalar_type()) * momentum;
  running_mean.add_((statistics.mean - running_mean) * share);
  running_var.add_((unbiased - running_var) * share);
}

/// (input - mean) invstd weight + bias. Its backward is collective; weight and bias, which may be
/// undefined, get this process's share of their gradients.
at::Tensor normalise_shared(const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, const SharedStatistics& statistics,
                            const std::shared_ptr<StatisticsExchange>& exchange);

/// bn(x) in training with bn.exchange.
at::Tensor shared_batch_norm(const at::Tensor& x, const BatchNormLayer& bn);

/// Keeps an exchange, which is no IValue, in an autograd node. nullptr stays nullptr.
void keep_exchange(torch::autograd::AutogradContext* ctx,
                   const std::shared_ptr<StatisticsExchange>& exchange);
StatisticsExchange* kept_exchange(torch::autograd::AutogradContext* ctx);

}  // namespace ddp::ops::detail
