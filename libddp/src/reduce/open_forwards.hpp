// SPDX-License-Identifier: Apache-2.0
// The forwards that still wait for their backward. Usually one backward follows one forward. Other
// patterns are two forwards with one backward of both, two forwards with one backward each, and
// forwards without a backward (a skipped step, a logged loss).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/reduce/options.hpp"
#include "reduce/gradient_hooks.hpp"

namespace ddp::detail {

class OpenForwards {
 public:
  /// What a backward that reaches an output of a forward is.
  enum class Reached {
    Expected,  ///< that of a synchronised forward
    Again,     ///< another one of a synchronised forward that had its backward: it is local
    Local,     ///< that of a forward under no_sync()
  };
  /// `on_reached` runs on the engine's thread when a backward reaches an output of a forward.
  OpenForwards(const DdpOptions& options, const GradientHooks& hooks,
               std::function<void(Reached)> on_reached);

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
  /// Whether the outputs of a synchronised forward are not known.
  bool has_untracked() const { return num_untracked_ > 0; }
  /// Whether no synchronised backward ended since the last synchronised forward.
  bool forward_since_backward() const { return forward_since_backward_; }
  /// Whether a backward that reaches no known output is that of the last synchronised forward.
  /// Where one backward only follows, that of an output may be still to come: a nested backward
  /// runs before it reaches the output.
  bool may_run_unseen() const { return forward_since_backward_ && !one_backward_only_; }
  /// Whether an output exists that no backward has reached.
  bool has_unreached();

  /// With find_unused_parameters the first backward of a forward ends its reduction. A second
  /// backward of the same forward throws from now on.
  void close_reached();
  /// A synchronised backward ended. Whether another one is to come for an open forward. In a join
  /// none is: a later backward of one throws.
  bool expect_another_backward(bool in_join = false);
  /// Adds a forward under no_sync().
  void add_local(const std::vector<at::Tensor>& outputs);
  /// After a step that was begun and undone.
  void clear();

 private:
  struct Forward {
    bool is_local = false;              // ran under no_sync()
    std::atomic<bool> reached = false;  // by a backward
    std::atomic<bool> closed = false;   // the only pass of it ended before it was reached whole
    std::atomic<bool> ended = false;    // its backward ended: another one of it is local
  };
  struct Open {
    std::weak_ptr<Forward> forward;      // expires with the forward's graph
    std::vector<WeakNodePointer> nodes;  // of the outputs
    std::vector<bool> reachable;

    bool is_reached() const;
    bool is_in_running_graph() const;
  };

  void watch(const std::vector<at::Tensor>& outputs, const std::shared_ptr<Forward>& forward);
  void forget_ended();

  const bool walks_;              // find_unused_parameters, and the graph changes
  const bool one_backward_only_;  // of several forwards
  const GradientHooks& hooks_;
  // The outputs' hooks hold it weakly: a graph may outlive this object.
  const std::shared_ptr<std::function<void(Reached)>> on_reached_;
  std::vector<Open> open_;
  std::vector<Open> local_;
  int num_untracked_ = 0;        // synchronised forwards whose outputs are not known
  std::vector<bool> untracked_;  // what they reach
  bool forward_since_backward_ = false;
};

}  // namespace ddp::detail
