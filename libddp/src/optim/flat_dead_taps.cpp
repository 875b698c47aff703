// SPDX-License-Identifier: Apache-2.0
// Taps of 3x3 filters that nothing reads are left behind: their updates become one 2x2 matrix a
// filter (FlatDecay), which is applied when somebody is about to read them.
//
// What is left behind is decided once a filter, in its first step. If more taps come into use
// later, all of it is updated as usual from then on; but a step that was captured before leaves
// behind what it always did, so that every reader goes on bringing it up to date.
#include <algorithm>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/ops/filter_taps.hpp"
#include "ddp/ops/grad_slot.hpp"
#include "optim/capture.hpp"
#include "optim/flat_launch.hpp"
#include "optim/flat_optimizer.hpp"
#include "optim/flat_tables.hpp"

namespace ddp::detail {
namespace {

// Live taps first; `inner` stays 0 where memory does not keep whole vectors of a tap together.
FlatTaps taps_in_memory(const at::Tensor& leaf, ops::Taps live) {
  FlatTaps taps;
  const int64_t inner = leaf.stride(3);
  if (leaf.stride(2) != 3 * inner || inner % 4 != 0 || leaf.numel() > INT32_MAX) {
    return taps;
  }
  taps.inner = static_cast<int32_t>(inner);
  taps.num_live = 0;
  int place = 0;
  for (const bool is_live : {true, false}) {
    for (uint64_t tap = 0; tap < 9; ++tap) {
      if (((live >> tap) & 1) == (is_live ? 1 : 0)) {
        taps.order |= tap << (4 * place++);
        taps.num_live += is_live ? 1 : 0;
      }
    }
  }
  return taps;
}

ops::Taps mask_of_dead(const FlatTaps& taps) {
  ops::Taps mask = 0;
  for (int place = taps.num_live; place < 9; ++place) {
    mask |= static_cast<ops::Taps>(1 << ((taps.order >> (4 * place)) & 15));
  }
  return mask;
}

}  // namespace

FlatTaps FlatOptimizer::dead_taps_of(size_t index) const {
  const at::Tensor& leaf = states_[index].leaf;
  const ops::TapUse* use = ops::find_tap_use(leaf);
  const bool has_taps = leaf.dim() == 4 && leaf.size(2) == 3 && leaf.size(3) == 3;
  if (!has_taps || use == nullptr || ops::find_grad_slot(leaf) == nullptr || use->used == 0 ||
      use->used == ops::kAllTaps || !segment_of(index).aligned) {
    return {};
  }
  FlatTaps taps = taps_in_memory(leaf, use->used);
  if (taps.inner != 0) {
    taps.decay = static_cast<FlatDecay*>(decays_.data_ptr()) + index;
  }
  return taps;
}

void FlatOptimizer::leave_behind(size_t index, const FlatTaps& taps) {
  behind_[index] = taps;
  ops::TapUse* use = ops::find_tap_use(states_[index].leaf);
  use->left_behind = mask_of_dead(taps);
  use->bring_up_to_date = [this, index, alive = std::weak_ptr(lifetime_)] {
    if (!alive.expired()) {
      bring_up_to_date(index);
    }
  };
}

// Before each step's update.
void FlatOptimizer::follow_taps() {
  std::vector<FlatTaps> now = taps_;
  bool changed = false;
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& leaf = states_[i].leaf;
    if (behind_[i].inner != 0) {
      const ops::TapUse* use = ops::find_tap_use(leaf);
      if (use == nullptr || (use->used & mask_of_dead(behind_[i])) != 0) {
        bring_up_to_date(i);  // every time: a captured step may have left them behind again
        now[i] = {};
      }
    } else if (!taps_decided_[i] && leaf.grad().defined()) {
      taps_decided_[i] = true;
      now[i] = dead_taps_of(i);
      if (now[i].inner != 0) {
        leave_behind(i, now[i]);
      }
    }
    changed = changed || now[i].inner != taps_[i].inner;
  }
  if (!changed) {
    return;
  }
  refuse_to_make_while_capturing("the optimizer's table of parameters");
  replaced_.insert(replaced_.end(), {segments_, update_chunks_, behind_table_});
  for (const BucketTable& table : bucket_tables_) {
    replaced_.push_back(table.chunks);
  }
  bucket_tables_.clear();
  taps_ = std::move(now);
  cut_update_chunks();
  make_tables();
}

// The segments as readers want them brought up to date, whatever updates leave behind by now.
void FlatOptimizer::make_behind_table() {
  if (!skips_dead_taps_) {
    return;
  }
  std::vector<FlatSegment> segments;
  for (size_t i = 0; i < states_.size(); ++i) {
    segments.push_back(segment_of(i));
    segments.back().taps = behind_[i];
  }
  behind_table_ = to_device(segments, device_);
}

void FlatOptimizer::bring_up_to_date(size_t index) const {
  const FlatTaps& taps = behind_[index];
  const int64_t num_behind = states_[index].leaf.numel() / 9 * (9 - taps.num_live);
  flat_catch_up(static_cast<const FlatSegment*>(behind_table_.data_ptr()) + index, num_behind,
                device_);
}

void FlatOptimizer::bring_all_up_to_date() const {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (behind_[i].inner != 0) {
      bring_up_to_date(i);
    }
  }
}

FlatOptimizer::~FlatOptimizer() {
  try {
    wait_for_updates();
    bring_all_up_to_date();
  } catch (const std::exception& error) {
    log_error(
        concat("optimizer: weights left behind by optimizer.skip_dead_taps could not be "
               "brought up to date: ",
               error.what()));
  }
}

}  // namespace ddp::detail
