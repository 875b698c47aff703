// SPDX-License-Identifier: Apache-2.0
// What a step changes in a reducer on the host, kept and put back: a capture runs the host's side
// of a step and nothing of the device's, and where it fails neither must have happened.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ddp/ops/grad_slot.hpp"
#include "ddp/reduce/reducer.hpp"

namespace ddp {

struct Reducer::HostState {
  /// The current stream (on the CPU: the host) waits for what a forward without a backward, or a
  /// backward that an exception ended, left under way: buffers on their way, reductions. To be
  /// called before parameters or buffers are read or written from outside, and before a capture.
  static void finish_pending(Reducer& reducer);
  /// A backward of it ended since.
  bool is_before_backward(const Reducer& reducer) const;
  /// Why replays of what was captured since would not do what it did: counts of weighted_backward
  /// are added up from one step to the next. Empty: they would.
  std::string why_not_replayed(const Reducer& reducer) const;

  struct Parameter {
    at::Tensor grad;
    at::Tensor set_aside;
    bool used = false;
    bool reduced = false;
    ops::GradSlot slot;
  };
  std::vector<Parameter> parameters;
  double weight = 0;
  at::Tensor device_weight;
  bool is_weighted = false;
  int64_t num_passes = 0;
  int64_t num_local_passes = 0;
  std::vector<int> previous_ready_order;
  std::vector<bool> previous_unused;
  bool unused_set_changed = false;
  bool buffers_sent = false;
};

}  // namespace ddp
