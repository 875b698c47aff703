// SPDX-License-Identifier: Apache-2.0
// Statistics and sums of several processes on a GPU.
#include "ops/shared/statistics_exchange.hpp"
#include "ops/vision/batch_norm_call.hpp"

namespace ddp::ops::detail {
namespace {

// A process without input sends a count of zero.
void write_moments(const KernelScope& kernels, const at::Tensor& x, const BatchNormLayer& bn,
                   const at::Tensor& moments) {
  if (x.numel() == 0) {
    moments.zero_();
    return;
  }
  StatisticsCall call;
  call.x = x.const_data_ptr();
  call.moments = moments.mutable_data_ptr<float>();
  call.grid = kernels.sums_grid(x);
  const Scratch scratch(call.grid, 2, bn.kernel_counters, bn.weight);
  call.scratch = scratch.pointers();
  kernels(launch_statistics, call);
}

at::Tensor merge(const KernelScope& kernels, const BatchNormLayer& bn, const at::Tensor& moments) {
  const int64_t channels = bn.weight.numel();
  const auto statistics = at::empty({2 * channels + 1}, moments.options());
  auto* mean = statistics.mutable_data_ptr<float>();
  MergeCall call;
  call.processes = static_cast<int>(moments.size(0));
  call.channels = static_cast<int>(channels);
  call.moments = moments.const_data_ptr<float>();
  call.stride = static_cast<int>(moments.stride(0));
  call.mean = mean;
  call.invstd = mean + channels;
  call.count = mean + 2 * channels;
  call.running_mean = bn.running_mean.mutable_data_ptr<float>();
  call.running_var = bn.running_var.mutable_data_ptr<float>();
  call.momentum = static_cast<float>(bn.momentum);
  call.eps = static_cast<float>(bn.eps);
  C10_CUDA_CHECK(launch_merge_statistics(call, kernels.stream()));
  return statistics;
}

}  // namespace

std::array<at::Tensor, 2> compute_shared_statistics(const KernelScope& kernels, const at::Tensor& x,
                                                    const BatchNormLayer& bn, const at::Tensor& z,
                                                    const BatchNormLayer* bn_z) {
  const int64_t moments = 2 * x.size(1) + 1;
  const auto mine = at::empty({bn_z != nullptr ? 2 * moments : moments},
                              bn.weight.options().requires_grad(false));
  write_moments(kernels, x, bn, mine.narrow(0, 0, moments));
  if (bn_z != nullptr) {
    write_moments(kernels, z, *bn_z, mine.narrow(0, moments, moments));
  }
  const auto all = bn.exchange->all_gather(mine);
  return {merge(kernels, bn, all),
          bn_z != nullptr ? merge(kernels, *bn_z, all.narrow(1, moments, moments)) : at::Tensor()};
}

SharedSums::SharedSums(StatisticsExchange* exchange, const at::Tensor& statistics,
                       BackwardTarget& first, BackwardTarget* second)
    : exchange_(exchange), statistics_(statistics) {
  if (exchange_ == nullptr) {
    return;
  }
  const int64_t channels = statistics.numel() / 2;
  sums_ = at::empty({second != nullptr ? 4 : 2, channels}, statistics.options());
  auto* sums = sums_.mutable_data_ptr<float>();
  first.sum = sums;
  first.product = sums + channels;
  if (second != nullptr) {
    second->sum = sums + 2 * channels;
    second->product = sums + 3 * channels;
  }
}

void SharedSums::finish(const KernelScope& kernels, const BackwardTarget& first,
                        const BackwardTarget* second) const {
  if (exchange_ == nullptr) {
    return;
  }
  exchange_->all_reduce(sums_);
  for (const auto* target : {&first, second}) {
    if (target != nullptr) {
      SharedSumsCall call;
      call.channels = static_cast<int>(sums_.size(1));
      call.sum = target->sum;
      call.product = target->product;
      call.count = statistics_.const_data_ptr<float>() + 2 * sums_.size(1);
      call.target = *target;
      C10_CUDA_CHECK(launch_shared_coefficients(call, kernels.stream()));
    }
  }
}

}  // namespace ddp::ops::detail
