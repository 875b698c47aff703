// SPDX-License-Identifier: Apache-2.0
// Updates of buckets while backward goes on:
//
//   compute  | forward | ... backward of layer k  | backward of layers below    | step: wait |
//   forward comm     |         |              [reduce b] |   [reduce c]                 |     ^
//   side     |         |                  [update b]    [update c]---------------------+
//
// A bucket's parameters are not read any more by then: their gradients are complete, and so is what
// backward needed of them. On one GPU `reduce` takes no time and the update follows the gradients.
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "ddp/core/error.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "ops/private_stream.hpp"
#include "ops/stream_order.hpp"
#include "optim/capture.hpp"
#include "optim/flat_launch.hpp"
#include "optim/flat_optimizer.hpp"
#include "optim/flat_tables.hpp"

namespace ddp::detail {
namespace {

bool looks_at_gradients(const StepScalars& scalars) {
  return scalars.inverse_scale.defined() || scalars.found_inf.defined() ||
         scalars.clip_factor.defined();
}

struct UpdateStream {
  explicit UpdateStream(const c10::Stream& main)
      : stream(ops::detail::make_private_stream(main.device())) {}
  c10::Stream stream;
};

}  // namespace

void check_begin_step(const StepScalars& scalars) {
  if (looks_at_gradients(scalars)) {
    throw SettingsError(
        "Optimizer::begin_step with inverse_scale, found_inf or clip_factor: they are known only "
        "after backward; leave begin_step out of such steps");
  }
  if (!scalars.lr.defined()) {
    throw SettingsError("Optimizer::begin_step needs a learning rate: begin_step({.lr = 0.1})");
  }
}

void check_end_of_begun_step(const StepScalars& scalars) {
  if (looks_at_gradients(scalars)) {
    throw SettingsError(
        "Optimizer::step with inverse_scale, found_inf or clip_factor after begin_step: parameters "
        "were updated already; leave begin_step out of such steps");
  }
}

Reducer::BucketListener FlatOptimizer::bucket_listener() {
  updates_buckets_ = true;
  return [this, alive = std::weak_ptr(lifetime_)](const GradBucket& bucket, const WorkPtr& work) {
    if (!alive.expired()) {
      update_bucket(bucket, work);
    }
  };
}

void FlatOptimizer::listen_to(Reducer& reducer) {
  const auto wait = [this, alive = std::weak_ptr(lifetime_)] {
    if (!alive.expired()) {
      wait_for_updates();  // of a step that was begun and left by an exception
    }
  };
  reducer.set_bucket_listener(bucket_listener(), wait, wait);
}

// What a capture began and did not end never ran.
int64_t FlatOptimizer::num_updated() const {
  return begun_in_capture_ == is_capturing() ? std::count(updated_.begin(), updated_.end(), true)
                                             : 0;
}

void FlatOptimizer::wait_for_updates() const {
  if (side_ && num_updated() > 0) {
    ops::detail::wait_for(*side_, ops::detail::current_stream(device_));
  }
}

int64_t FlatOptimizer::end_begun_step() {
  const int64_t updated = num_updated();
  wait_for_updates();
  updated_.clear();
  begun_.reset();
  begun_kept_.clear();
  return updated;
}

void FlatOptimizer::begin_step(const StepScalars& scalars) {
  if (!updates_buckets_) {
    return;
  }
  check_begin_step(scalars);
  const int64_t left = end_begun_step();
  begun_in_capture_ = is_capturing();
  if (left > 0) {
    throw SettingsError(concat(
        "Optimizer::begin_step: the step before was begun and never ended by Optimizer::step, "
        "after its backward had updated ",
        left, " of ", states_.size(),
        " parameters: a begun step cannot be skipped; set optimizer.overlap_backward=false where "
        "steps may be"));
  }
  prepare_storage();
  // Masters are made in a step of the usual kind.
  if (std::all_of(states_.begin(), states_.end(),
                  [](const ParameterState& state) { return state.has_state; })) {
    begun_ = arguments(scalars);
    begun_kept_ = std::move(kept_);
    kept_.clear();
    updated_.assign(states_.size(), false);
  }
}

size_t FlatOptimizer::index_of(const at::Tensor& leaf) const {
  const auto found = std::find_if(states_.begin(), states_.end(), [&](const ParameterState& state) {
    return state.leaf.is_same(leaf);
  });
  DDP_CHECK(found != states_.end(), "a bucket holds a parameter that is not the optimizer's");
  return static_cast<size_t>(found - states_.begin());
}

// Made anew where the buckets were laid out anew.
FlatOptimizer::BucketTable& FlatOptimizer::table_of(const GradBucket& bucket) {
  const auto index = static_cast<size_t>(bucket.index);
  if (bucket_tables_.size() <= index) {
    bucket_tables_.resize(index + 1);
  }
  BucketTable& table = bucket_tables_[index];
  const bool current =
      table.parameters.size() == bucket.parameters.size() &&
      std::equal(table.parameters.begin(), table.parameters.end(), bucket.parameters.begin(),
                 [&](size_t i, const at::Tensor& leaf) { return states_[i].leaf.is_same(leaf); });
  if (current) {
    return table;
  }
  refuse_to_make_while_capturing("the optimizer's table of a bucket");
  table = {};
  std::vector<FlatChunk> chunks;
  for (const at::Tensor& leaf : bucket.parameters) {
    table.parameters.push_back(index_of(leaf));
    append_chunks(chunks, table.parameters.back(), leaf.numel());
  }
  table.chunks = to_device(chunks, device_);
  table.gradients.num_segments = static_cast<int32_t>(states_.size());
  table.gradients.num_chunks = static_cast<int32_t>(chunks.size());
  return table;
}

void FlatOptimizer::update_bucket(const GradBucket& bucket, const WorkPtr& work) {
  if (!begun_ || begun_in_capture_ != is_capturing()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const TraceScope trace("update bucket", "compute");
  BucketTable& table = table_of(bucket);
  for (size_t k = 0; k < table.parameters.size(); ++k) {
    const size_t i = table.parameters[k];
    if (updated_[i]) {
      throw SettingsError(
          "two synchronised backwards after one Optimizer::begin_step: call it before the last one "
          "of a step, the others under no_sync()");
    }
    updated_[i] = true;
    put_gradient(table.gradients, i, bucket.gradients[k]);
  }
  FlatStep step = *begun_;
  step.chunks = static_cast<const FlatChunk*>(table.chunks.data_ptr());
  if (device_.is_cpu()) {
    if (work) {
      work->wait();
    }
    flat_update(step, table.gradients, device_);
    return;
  }
  const auto current = ops::detail::current_stream(device_);
  if (!side_) {
    side_ = ops::detail::beside<UpdateStream>(current).stream;
  }
  ops::detail::wait_for(current, *side_);
  const c10::StreamGuard on_side(*side_);
  if (work) {
    work->wait();
  }
  flat_update(step, table.gradients, device_);
}

void FlatOptimizer::join_begun_step(const StepScalars& scalars) {
  begun_.reset();
  begun_kept_.clear();
  if (num_updated() == 0) {
    updated_.clear();
    return;
  }
  check_end_of_begun_step(scalars);
  wait_for_updates();
}

}  // namespace ddp::detail
