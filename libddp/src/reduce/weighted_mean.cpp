// SPDX-License-Identifier: Apache-2.0
#include "reduce/weighted_mean.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "comm/collective_label.hpp"
#include "ddp/core/error.hpp"
#include "ops/shared/timing_event.hpp"
#include "reduce/model/shared_parameters.hpp"
#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "comm/nccl/nccl_kernels.hpp"
#endif

namespace ddp::detail {

using ops::detail::current_stream;
using ops::detail::wait_for;

namespace {

/// data *= factor, which has one element. PyTorch's mul_ is three times slower for this bf16
/// product of two dtypes.
void scale_by(const at::Tensor& data, const at::Tensor& factor) {
#ifdef DDP_HAS_CUDA
  if (data.is_cuda() && data.scalar_type() == at::kBFloat16 && data.is_contiguous()) {
    C10_CUDA_CHECK(launch_scale(data.mutable_data_ptr(), data.numel(),
                                factor.to(at::kFloat).const_data_ptr<float>(),
                                c10::cuda::getCurrentCUDAStream(data.device().index())));
    return;
  }
#endif
  data.mul_(factor);
}

at::ScalarType widest_dtype(GradientArena& gradients) {
  const auto& buckets = gradients.buckets();
  return std::any_of(buckets.begin(), buckets.end(),
                     [](const GradBucket& b) { return b.buffer.scalar_type() == at::kDouble; })
             ? at::kDouble
             : at::kFloat;
}

void refuse_plain(const WeightedMean::Counts& counts, const GradientArena& gradients) {
  if (counts.is_plain || (!counts.is_weighted && shared_gradient_waits(gradients))) {
    throw SettingsError(
        "weighted_backward while gradients of backward() under no_sync() wait for the mean over "
        "the ranks: the counts would divide them, too; fix: call weighted_backward for every "
        "backward of the step, or zero_grad() (with set_to_none) first");
  }
}

}  // namespace

WeightedMean::WeightedMean(CommunicatorPtr communicator, GradientArena& gradients)
    : communicator_(std::move(communicator)),
      gradients_(gradients),
      sum_(at::zeros(
          {1},
          at::TensorOptions().dtype(widest_dtype(gradients)).device(communicator_->device()))) {}

void WeightedMean::begin_backward() {
  // Means with local gradients of before the join cannot be set aside, and with all ranks active
  // they need not.
  const bool are_added = counts_.is_plain;
  if (has_own_divisor() && !(are_added && divisor() == communicator_->world_size())) {
    gradients_.set_reduced_aside(are_added);
  }
}

void WeightedMean::check_gradient() const {
  if (counts_.is_weighted && !runs_weighted_) {
    throw SettingsError(
        "backward() while gradients of weighted_backward under no_sync() wait: their counts would "
        "divide its gradient, too; fix: call weighted_backward for every backward of the step, or "
        "zero_grad() (with set_to_none) before the forward");
  }
}

void WeightedMean::record_gradient(bool is_reduced) {
  check_gradient();
  counts_.is_plain = counts_.is_plain || !(is_reduced || runs_weighted_);
}

void WeightedMean::add(double count) {
  refuse_plain(counts_, gradients_);
  gradients_.set_reduced_aside();
  counts_.host += count;
  counts_.is_weighted = true;
}

void WeightedMean::add(const at::Tensor& count) {
  const at::NoGradGuard no_grad;
  refuse_plain(counts_, gradients_);
  gradients_.set_reduced_aside();
  // A copy, because the caller may overwrite its tensor before the synchronised backward.
  const auto added =
      count.detach().to(sum_.scalar_type(), /*non_blocking=*/false, /*copy=*/true).reshape({1});
  counts_.device = counts_.device.defined() ? counts_.device + added : added;
  device_stream_ = current_stream(communicator_->device());
  counts_.is_weighted = true;
}

void WeightedMean::undo_add(const Counts& before) {
  if (!before.is_weighted) {
    gradients_.add_set_aside();
  }
  counts_ = before;
}

bool WeightedMean::scales_after_sum() const {
  return counts_.is_weighted || divisor() != communicator_->world_size();
}

void WeightedMean::check_counts() const {
  if (requires_counts_ && !counts_.is_weighted) {
    throw SettingsError(
        "join: JoinOptions::weighted=true, but the loop called loss.backward(); fix: call "
        "model.weighted_backward(loss_sum, count), or omit JoinOptions::weighted");
  }
}

void WeightedMean::start() {
  finished_stream_ = std::nullopt;
  if (!counts_.is_weighted) {
    return;
  }
  sum_.fill_(counts_.host);
  if (counts_.device.defined()) {
    const auto device = communicator_->device();
    if (!device.is_cpu()) {
      wait_for(*device_stream_, current_stream(device));
    }
    sum_.add_(counts_.device);
  }
  static const auto label = make_label("sum of the counts");
  const LabelScope scope(label);
  work_ = communicator_->all_reduce(sum_, ReduceOp::Sum);
}

void WeightedMean::set_bucket_divisor(GradBucket& bucket) const {
  bucket.divisor = divisor();
  bucket.inverse_count = counts_.is_weighted ? sum_ : at::Tensor();
}

void WeightedMean::finish() {
  const auto device = communicator_->device();
  const auto work = std::exchange(work_, nullptr);
  if (work == nullptr) {
    if (finished_stream_) {
      wait_for(*finished_stream_, current_stream(device));
    }
    return;
  }
  work->wait();
  if (!device.is_cpu()) {
    finished_stream_ = current_stream(device);
  }
  // If no rank counted an item, the gradient is zero. A count of NaN stays NaN.
  sum_.copy_(at::where(sum_ == 0, at::zeros_like(sum_), sum_.reciprocal()));
}

void WeightedMean::scale(const GradBucket& bucket) const {
  if (counts_.is_weighted) {
    scale_by(bucket.shard, sum_);
  } else if (scales_after_sum()) {
    bucket.shard.div_(bucket.divisor);
  }
}

void WeightedMean::divide(const at::Tensor& sum) const {
  if (counts_.is_weighted) {
    scale_by(sum, sum_);
  } else {
    sum.div_(divisor());
  }
}

}  // namespace ddp::detail
