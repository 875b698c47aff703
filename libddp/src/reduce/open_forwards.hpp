// SPDX-License-Identifier: Apache-2.0
// The forwards that still wait for their backward. Usually one backward follows one forward. Other
// patterns are two forwards with one backward of both, two forwards with one backward each, and
// forwards without a backward (a skipped step, a logged loss).
//
// A forward whose outputs have a graph is tracked. The others are counted, because nothing shows
// which of them a backward belongs to.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/reduce/options.hpp"
#include "reduce/gradient_action.hpp"
#include "reduce/gradient_hooks.hpp"

namespace ddp::detail {

class OpenForwards {
 public:
  /// `on_reached` runs on the engine's thread when a backward reaches an output of a forward. It
  /// gets Synchronised, Repeated or Local.
  OpenForwards(const DdpOptions& options, const GradientHooks& hooks,
               std::function<void(Backward)> on_reached);

  /// Adds a synchronised forward. Throws SettingsError if find_unused_parameters needs a graph and
  /// the outputs have none.
  void add(const std::vector<at::Tensor>& outputs);
  /// Per parameter: whether the backward that runs reaches it. Without find_unused_parameters:
  /// whether it was trained in one of its forwards. If the backward's forwards are not known, all
  /// open ones count. Empty before the first.
  std::vector<bool> reachable() const;
  /// Whether a backward from `outputs` reports when it begins: one of them has a graph.
  static bool can_track(const std::vector<at::Tensor>& outputs);
  /// Whether an output of an open forward is in the graph of the backward that runs in this thread.
  bool in_running_backward() const;
  /// The same of the forwards under no_sync().
  bool local_in_running_backward() const;
  /// The row of action_for(). `waits`: whether a synchronised forward waits for a backward.
  Forwards kind(bool waits) const;
  /// Whether the last forward ran under no_sync().
  bool last_is_local() const { return last_is_local_; }
  /// Whether an output exists that no backward has reached.
  bool has_unreached();

  /// With find_unused_parameters the first backward of a forward ends its reduction. A second
  /// backward of the same forward throws from now on.
  void close_reached();
  /// Call when a synchronised backward ended. Returns whether an open forward waits for another
  /// one. If only one is allowed, as in a join, it returns false, and a later backward throws.
  bool expect_another_backward(bool in_join = false);
  /// Adds a forward under no_sync().
  void add_local(const std::vector<at::Tensor>& outputs);
  /// Forgets all forwards, because their step was undone.
  void clear();

 private:
  enum class State {
    Waiting,  // no backward reached an output
    Reached,  // a backward did
    Ended,    // and ended, or another forward followed it: a further backward is a repeated one
    Closed,   // one backward is allowed, and it ended: a further one throws
  };
  struct Forward {
    bool is_local = false;  // ran under no_sync(): any number of backwards may follow
    std::atomic<State> state = State::Waiting;
  };
  struct Open {
    std::weak_ptr<Forward> forward;      // expires with the forward's graph
    std::vector<WeakNodePointer> nodes;  // of the outputs
    std::vector<bool> reachable;

    bool is_reached() const;
    bool is_in_running_graph() const;
  };

  void watch(const std::vector<at::Tensor>& outputs, const std::shared_ptr<Forward>& forward);
  void change_state(State from, State to);
  void forget_ended();

  const bool walks_;              // find_unused_parameters, and the graph changes
  const bool one_backward_only_;  // of several forwards
  const GradientHooks& hooks_;
  // The outputs' hooks hold it weakly: a graph may outlive this object.
  const std::shared_ptr<std::function<void(Backward)>> on_reached_;
  std::vector<Open> open_;
  std::vector<Open> local_;
  int num_untracked_ = 0;                // synchronised forwards whose outputs are not known
  std::vector<bool> untracked_;          // what they reach
  bool forward_since_backward_ = false;  // a synchronised forward, after the last such backward
  bool last_is_local_ = false;
};

}  // namespace ddp::detail
