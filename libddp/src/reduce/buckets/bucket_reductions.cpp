// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_reductions.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "comm/collective_label.hpp"
#include "comm/first_problem.hpp"
#include "ddp/core/error.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/shared/private_stream.hpp"
#include "ops/shared/timing_event.hpp"

namespace ddp::detail {

using ops::detail::current_stream;
using ops::detail::is_capturing;
using ops::detail::wait_for;

namespace {

void add_once(std::vector<c10::Stream>& streams, const c10::Stream& stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

std::string describe_tensor(const at::Tensor& tensor) {
  return tensor.defined()
             ? concat(tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device())
             : "an undefined tensor";
}

}  // namespace

BucketReductions::BucketReductions(CommunicatorPtr communicator, GradientArena& gradients,
                                   WeightedMean& mean)
    : communicator_(std::move(communicator)), gradients_(gradients), mean_(mean) {}

void BucketReductions::begin_pass() {
  join_streams();
  reductions_.assign(gradients_.buckets().size(), {});
  for (auto& bucket : gradients_.buckets()) {
    bucket.buffer =
        gradients_.bucket(bucket.index).buffer;  // a hook that threw may have replaced it
  }
}

void BucketReductions::record_gradient(int index, const ops::GradSlot& slot) {
  if (device().is_cpu()) {
    return;
  }
  auto& reduction = reductions_[static_cast<size_t>(index)];
  add_once(reduction.streams, current_stream(device()));
  if (slot.stream) {
    add_once(reduction.writers, *slot.stream);
  }
}

void BucketReductions::wait_for_gradients(int index) {
  for (const auto& stream : reductions_[static_cast<size_t>(index)].streams) {
    wait_for(stream, current_stream(device()));
  }
}

// Returns a separate stream if gradients were written on other streams than the current one: then
// the reduction waits for those streams and backward does not. A comm hook runs on the current
// stream, because its temporary tensors belong to that stream.
c10::Stream BucketReductions::stream_behind_gradients(size_t first, size_t last) {
  const auto current = current_stream(device());
  std::vector<c10::Stream> others;
  for (size_t b = first; b <= last; ++b) {
    for (const auto* streams : {&reductions_[b].streams, &reductions_[b].writers}) {
      std::copy_if(streams->begin(), streams->end(), std::back_inserter(others),
                   [&](const c10::Stream& stream) { return stream != current; });
    }
  }
  auto behind = current;
  if (!others.empty() && !hook_) {
    if (!launch_stream_) {
      launch_stream_ =
          ops::detail::make_private_stream(device(), ops::detail::StreamPriority::Highest);
    }
    behind = *launch_stream_;
    uses_launch_stream_ = true;
    wait_for(current, behind);
  }
  for (const auto& stream : others) {
    wait_for(stream, behind);
  }
  return behind;
}

// Returns whether the backward is rehearsed: nothing is sent.
bool BucketReductions::record_hashes(size_t first, size_t last) const {
  for (size_t b = first; b <= last && probe_ != nullptr; ++b) {
    const auto index = static_cast<int>(b);
    probe_->record(index, gradients_.bucket(index).buffer);
  }
  return is_rehearsal(probe_);
}

void BucketReductions::start(size_t first, size_t last) {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(device().type());
  mean_.check_counts();
  std::optional<c10::StreamGuard> guard;
  if (!device().is_cpu()) {
    guard.emplace(stream_behind_gradients(first, last));
  }
  if (record_hashes(first, last)) {
    return;
  }
  std::optional<GroupScope> group(std::in_place, *communicator_);
  if (first == 0) {
    mean_.start();
  }
  // The hook, or the wait for the sum of the counts, needs what the group has only queued.
  if (hook_ && (!hook_->starts_in_group() || hook_->reads_count())) {
    group.reset();
  }
  if (hook_ && hook_->reads_count()) {
    mean_.finish();
  }
  const auto op = mean_.reduce_op();
  for (size_t b = first; b <= last; ++b) {
    const LabelScope label(gradients_.bucket(static_cast<int>(b)).label);
    auto& bucket = gradients_.buckets()[b];
    mean_.set_bucket_divisor(bucket);
    bucket.loss_scale = loss_scale_;
    auto& work = reductions_[b].work;
    if (hook_) {
      const ops::detail::UncountedOps uncounted;
      hook_->start(bucket);
    } else if (gradients_.is_sharded()) {
      work = communicator_->reduce_scatter(bucket.shard, bucket.buffer, op);
    } else {
      work = communicator_->all_reduce(bucket.buffer, op);
    }
    reductions_[b].is_started = true;
  }
}

void BucketReductions::finish_bucket(size_t index) {
  auto& bucket = gradients_.buckets()[index];
  if (!std::exchange(reductions_[index].is_started, false)) {
    return;  // an exception ended start()
  }
  if (hook_) {
    const LabelScope label(gradients_.bucket(bucket.index).label);
    const ops::detail::UncountedOps uncounted;
    hook_->finish(bucket);
    copy_hook_result(bucket);
    return;
  }
  std::exchange(reductions_[index].work, nullptr)->wait();
  mean_.scale(bucket);
}

// A hook may assign another tensor to bucket.buffer instead of writing into it.
void BucketReductions::copy_hook_result(GradBucket& bucket) const {
  const at::Tensor& buffer = gradients_.bucket(bucket.index).buffer;
  const at::Tensor result = std::exchange(bucket.buffer, buffer);
  if (result.is_same(buffer)) {
    return;
  }
  if (!result.defined() || result.sizes() != buffer.sizes() ||
      result.scalar_type() != buffer.scalar_type() || result.device() != buffer.device()) {
    throw SettingsError(concat("the comm hook ", hook_->name(), " left ", describe_tensor(result),
                               " in bucket.buffer of bucket ", bucket.index, ", which is ",
                               describe_tensor(buffer),
                               "; fix: leave a tensor of the same shape, dtype and device"));
  }
  buffer.copy_(result);
}

void BucketReductions::finish() {
  FirstProblem problem;
  problem.attempt([&] { mean_.finish(); });
  for (size_t b = 0; b < reductions_.size(); ++b) {
    problem.attempt([&] { finish_bucket(b); });
  }
  problem.rethrow();
  if (std::exchange(uses_launch_stream_, false)) {  // a captured stream has to be joined
    wait_for(*launch_stream_, current_stream(device()));
  }
  if (probe_ != nullptr) {
    probe_->end_backward();
  }
}

// During a capture nothing is pending, because the caller ran finish_pending() before it.
void BucketReductions::join_streams() {
  if (std::exchange(uses_launch_stream_, false) && !is_capturing(device())) {
    wait_for(*launch_stream_, current_stream(device()));
  }
}

void BucketReductions::abandon() {
  for (auto& reduction : reductions_) {
    if (reduction.work != nullptr && device().is_cpu()) {
      reduction.work->wait();
    }
    reduction = {};
  }
  mean_.abandon();
  uses_launch_stream_ = false;
}

}  // namespace ddp::detail
