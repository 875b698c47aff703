// SPDX-License-Identifier: Apache-2.0
// Taps of 3x3 filters that nothing reads are left behind: their updates become one 2x2 matrix a
// filter (FlatDecay), which is applied when somebody is about to read them.
//
// What is left behind is decided once, in the first step, by all ranks. If more taps come into use
// later, all of the filter is updated as usual from then on; but a step that was captured before
// leaves behind what it always did, so that every reader goes on bringing it up to date. With
// several ranks that is an error: a rank whose images are small would drop what larger ones of
// another contribute to the mean.
#include <algorithm>

#include "ddp/core/logging.hpp"
#include "ddp/ops/filter_taps.hpp"
#include "ddp/ops/grad_slot.hpp"
#include "optim/capture.hpp"
#include "optim/flat_launch.hpp"
#include "optim/flat_optimizer.hpp"
#include "optim/flat_tables.hpp"
#include "reduce/tap_agreement.hpp"

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

bool FlatOptimizer::may_leave_behind(size_t index) const {
  const at::Tensor& leaf = states_[index].leaf;
  return is_3x3_filter(leaf) && ops::find_tap_use(leaf) != nullptr &&
         ops::find_grad_slot(leaf) != nullptr && segment_of(index).aligned &&
         taps_in_memory(leaf, ops::kAllTaps).inner != 0;
}

// Of each parameter, on any rank: a gradient is zero after its reduction only where it is zero on
// all of them. The host waits.
std::vector<ops::Taps> FlatOptimizer::taps_in_use() const {
  std::vector<ops::Taps> own;
  for (size_t i = 0; i < states_.size(); ++i) {
    own.push_back(may_leave_behind(i) ? ops::find_tap_use(states_[i].leaf)->used : ops::kAllTaps);
  }
  return taps_of_any_rank(*model_->communicator(), own);
}

void FlatOptimizer::leave_behind(size_t index, const FlatTaps& taps) {
  behind_[index] = taps;
  ops::TapUse* use = ops::find_tap_use(states_[index].leaf);
  use->left_behind = mask_of_dead(taps);
  use->keeper = lifetime_;
  use->bring_up_to_date = [this, index, alive = std::weak_ptr(lifetime_)] {
    if (!alive.expired()) {
      bring_up_to_date(index);
    }
  };
}

void FlatOptimizer::decide_taps() {
  const bool any = std::any_of(states_.begin(), states_.end(), [](const ParameterState& state) {
    return state.leaf.grad().defined();
  });
  // In a join some ranks make no step.
  if (!any || model_->is_joining()) {
    return;
  }
  refuse_to_make_while_capturing("the choice of weights whose updates are put off");
  taps_decided_ = true;
  const std::vector<ops::Taps> used = taps_in_use();
  std::vector<FlatTaps> decided(states_.size());
  int64_t num_behind = 0;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (used[i] == 0 || used[i] == ops::kAllTaps) {
      continue;
    }
    decided[i] = taps_in_memory(states_[i].leaf, used[i]);
    decided[i].decay = static_cast<FlatDecay*>(decays_.data_ptr()) + i;
    leave_behind(i, decided[i]);
    num_behind += states_[i].leaf.numel() / 9 * (9 - decided[i].num_live);
  }
  if (num_behind > 0) {
    use_taps_anew(std::move(decided));
  } else if (model_->communicator()->rank() == 0) {
    log_warning(
        "optimizer.skip_dead_taps=true puts nothing off: every tap of every 3x3 filter is read, by "
        "a forward, an Ema or ops that are not ddp::ops::conv2d");
  }
}

bool FlatOptimizer::came_into_use(size_t index) const {
  if (taps_[index].inner == 0) {
    return false;
  }
  const ops::TapUse* use = ops::find_tap_use(states_[index].leaf);
  const ops::Taps dead = mask_of_dead(taps_[index]);
  // A leaf that was given other memory has forgotten what is left behind.
  return use == nullptr || (use->left_behind & dead) == 0 || (use->used & dead) != 0;
}

// The others may go on without these gradients, and could not be asked: they need not be here.
void FlatOptimizer::refuse_late_use(size_t index) const {
  throw late_taps_error(states_[index].name, "; several ranks settle once what they leave behind");
}

// Before each step's update.
void FlatOptimizer::follow_taps() {
  if (!skips_dead_taps_) {
    return;
  }
  if (!taps_decided_) {
    decide_taps();
    return;
  }
  std::vector<FlatTaps> now = taps_;
  bool changed = false;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (came_into_use(i)) {
      if (model_->communicator()->world_size() > 1) {
        refuse_late_use(i);
      }
      now[i] = {};
      changed = true;
    }
    if (behind_[i].inner != 0 && now[i].inner == 0) {
      bring_up_to_date(i);  // every time: a captured step may have left them behind again
    }
  }
  if (changed) {
    use_taps_anew(std::move(now));
  }
}

void FlatOptimizer::use_taps_anew(std::vector<FlatTaps> taps) {
  refuse_to_make_while_capturing("the optimizer's table of parameters");
  replaced_.insert(replaced_.end(), {segments_, update_chunks_, behind_table_});
  for (const BucketTable& table : bucket_tables_) {
    replaced_.push_back(table.chunks);
  }
  bucket_tables_.clear();
  taps_ = std::move(taps);
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
