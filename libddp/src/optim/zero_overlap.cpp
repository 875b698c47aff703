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
#include "ops/stream_order.hpp"
#include "optim/zero_optimizer.hpp"

namespace ddp::detail {
using ops::detail::current_stream;
using ops::detail::wait_for;

void ZeroOptimizer::begin_step(const StepScalars& scalars) {
  if (!options_.overlap_backward) {
    return;
  }
  if (leaves_moved()) {
    cut_anew();
  }
  num_updated_ = 0;
  begun_ = has_all_state_;
  if (own_) {
    own_->begin_step(scalars);
  }
}

void ZeroOptimizer::update_bucket(const GradBucket& bucket, const WorkPtr& work) {
  if (!begun_) {
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
      side_ = c10::impl::VirtualGuardImpl(device_.type())
                  .getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
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
}

// The last bucket's weights have no gradients to wait behind.
void ZeroOptimizer::send_last_updated() {
  std::optional<c10::StreamGuard> on_side;
  if (side_) {
    on_side.emplace(*side_);
  }
  take_weights(buckets_.back(), gather_weights(buckets_.back()));
}

// Whether backward updated all buckets; now or never.
bool ZeroOptimizer::join_begun_step(const StepScalars& scalars) {
  const bool updated = begun_ && num_updated_ > 0;
  begun_ = false;
  if (!updated) {
    return false;
  }
  DDP_CHECK(num_updated_ == buckets_.size(), "a backward reduced some of the buckets");
  send_last_updated();
  if (own_) {
    own_->step(scalars);  // it has nothing left to do
  }
  if (side_) {
    wait_for(*side_, current_stream(device_));
  }
  return true;
}

}  // namespace ddp::detail
