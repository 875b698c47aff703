// SPDX-License-Identifier: Apache-2.0
// Buckets are updated and their weights sent while backward goes on:
//
//   compute  | ... backward of layer k |  of layers below  |         | step: wait |
//   comm     |     [scatter b] [scatter c][gather b]  [scatter d][gather c]  [gather d]
//   side     |                [update b] [update c][take b]  [update d][take c]  [take d]
//
// A bucket's weights are sent behind the next bucket's gradients, so that the communicator does not
// stand still during the update. Nobody reads these parameters any more in this backward, nor what
// the bucket held of gradients. With one rank nothing is sent.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "ddp/core/error.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "ops/private_stream.hpp"
#include "ops/stream_order.hpp"
#include "optim/capture.hpp"
#include "optim/zero_optimizer.hpp"
#include "reduce/sharded_gradient.hpp"

namespace ddp::detail {
using ops::detail::current_stream;
using ops::detail::wait_for;

// What a capture began and did not end never ran.
size_t ZeroOptimizer::num_updated() const {
  return begun_ && (!begun_in_capture_ || is_capturing()) ? num_updated_ : 0;
}

// All ranks throw or none: whether a step was left they know alike, and own_ may be on some only.
void ZeroOptimizer::begin_step(const StepScalars& scalars) {
  if (!options_.overlap_backward) {
    return;
  }
  check_begin_step(scalars);
  follow_leaves(/*refuses=*/true);
  if (const size_t left = num_updated(); left > 0) {
    const std::string message = concat(
        "Optimizer::begin_step: the step before was begun and never ended by Optimizer::step, "
        "after its backward had updated ",
        left, " of ", buckets_.size(),
        " buckets: a begun step cannot be skipped; set optimizer.overlap_backward=false where "
        "steps may be");
    if (begun_in_capture_ == is_capturing()) {  // else it is ended by an eager step
      send_left_weights();
      end_begun_step();
    }
    throw SettingsError(message);
  }
  end_begun_step();
  if (own_) {
    own_->begin_step(scalars);
  }
  begun_ = has_all_state_;
  begun_in_capture_ = is_capturing();
  DDP_CHECK(!begun_ || own_ == nullptr || own_->has_begun(), "a part has no state");
}

void ZeroOptimizer::update_bucket(const GradBucket& bucket, const WorkPtr& work) {
  if (!begun_ || begun_in_capture_ != is_capturing()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const TraceScope trace("update bucket", "compute");
  if (num_updated_ == buckets_.size()) {
    throw SettingsError(
        "two synchronised backwards after one Optimizer::begin_step: call it before the last one "
        "of a step, the others under no_sync()");
  }
  DDP_CHECK(static_cast<size_t>(bucket.index) == num_updated_, "a bucket out of turn");
  std::optional<c10::StreamGuard> on_side;
  if (!device_.is_cpu()) {
    if (!side_) {
      side_ = ops::detail::make_private_stream(device_);
    }
    wait_for(current_stream(device_), *side_);
    on_side.emplace(*side_);
  }
  const ZeroBucket& cut = buckets_[num_updated_];
  const WorkPtr sent = num_updated_ > 0 ? gather_weights(buckets_[num_updated_ - 1]) : nullptr;
  if (!cut.pieces.empty()) {
    GradBucket own;
    own.index = bucket.index;
    for (const ZeroPiece& piece : cut.pieces) {
      own.parameters.push_back(piece.leaf);
      own.gradients.push_back(piece.gradient);
    }
    update_own_(own, work);
    if (side_) {
      wait_for(own_->update_stream().value(), *side_);
    }
  }
  put_weights(cut);
  if (sent) {
    take_weights(buckets_[num_updated_ - 1], sent);
  }
  ++num_updated_;
  mark_gradients(bucket.gradients);
}

void ZeroOptimizer::mark_gradients(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients) {
    sharded_gradient_meta(gradient)->holds_weights = true;
    marked_.push_back(gradient);
  }
}

void ZeroOptimizer::refuse_gradients_in_use() const {
  if (num_updated() > 0) {
    refuse_sent_weights();
  }
}

// The last bucket's weights have no gradients to wait behind.
void ZeroOptimizer::send_last_updated() {
  std::optional<c10::StreamGuard> on_side;
  if (side_) {
    on_side.emplace(*side_);
  }
  take_weights(buckets_.back(), gather_weights(buckets_.back()));
}

void ZeroOptimizer::wait_for_updates() const {
  if (side_ && num_updated() > 0 && begun_in_capture_ == is_capturing()) {
    wait_for(*side_, current_stream(device_));
  }
}

// Of a step that was begun and left by an exception: before the next training forward reads the
// weights they are those of all ranks, and no longer written on another stream. Who reads them
// earlier (one rank may, alone) finds this rank's. They are taken from the leaves, which may have
// been loaded anew since.
void ZeroOptimizer::send_left_weights() {
  if (num_updated() == 0 || last_is_sent_ || begun_in_capture_ != is_capturing()) {
    return;
  }
  const at::NoGradGuard no_grad;
  wait_for_updates();
  const ZeroBucket& last = buckets_[num_updated_ - 1];
  put_weights(last);
  take_weights(last, gather_weights(last));
  last_is_sent_ = true;
}

void ZeroOptimizer::end_begun_step() {
  if (own_) {
    own_->end_begun_step();
  }
  begun_ = false;
  last_is_sent_ = false;
  num_updated_ = 0;
  for (const at::Tensor& gradient : marked_) {
    sharded_gradient_meta(gradient)->holds_weights = false;
  }
  marked_.clear();
}

// Whether backward updated all buckets; now or never.
bool ZeroOptimizer::join_begun_step(const StepScalars& scalars) {
  const size_t updated = num_updated();
  if (updated > 0) {
    check_end_of_begun_step(scalars);
  }
  if (updated > 0 && updated < buckets_.size()) {
    send_left_weights();
    end_begun_step();
    throw SettingsError(concat("Optimizer::step: the backward of this begun step was left after ",
                               updated, " of ", buckets_.size(),
                               " buckets had been updated: leave such a step out (zero_grad() and "
                               "the next forward), or set optimizer.overlap_backward=false"));
  }
  if (updated > 0) {
    if (!last_is_sent_) {
      send_last_updated();
    }
    if (side_) {
      wait_for(*side_, current_stream(device_));
    }
  }
  end_begun_step();
  return updated > 0;
}

}  // namespace ddp::detail
