// SPDX-License-Identifier: Apache-2.0
// What a model does with a gradient, by the forwards that ran and by the backward that runs:
//
//   forwards     | Synchronised | Repeated | Local      | Unknown    | UnknownSharing | Shared
//   Untracked    | reduce       | reduce   | reduce     | reduce     | reduce         | reduce
//   Synchronised | reduce       | warn     | accumulate | reduce     | warn           | other
//   Local        | reduce       | warn     | accumulate | accumulate | accumulate     | other
//   Neither      | reduce       | warn     | accumulate | warn       | warn           | other
//
// OpenForwards::kind() finds the row, BackwardPass the column. If one backward is allowed (unused
// parameters, joins), OpenForwards throws in the next one, before it has a gradient.
#pragma once

#include <cstddef>

namespace ddp::detail {

/// Whose backward is one that reaches no known output?
enum class Forwards {
  Untracked,     ///< that of a synchronised forward that waits, and whose outputs have no graph
  Synchronised,  ///< else that of the last forward, synchronised and without a backward so far
  Local,         ///< else that of the last forward, under no_sync(): no synchronised one ran since
                 ///< the last synchronised backward
  Neither,       ///< nobody knows
};

/// What the backward that runs reaches: the first of these that holds.
enum class Backward {
  Synchronised,    ///< an output of a synchronised forward that waits for its backward
  Repeated,        ///< an output of a synchronised forward that had its backward
  Local,           ///< an output of a forward under no_sync()
  Unknown,         ///< none of these: a tensor that the module keeps, a module without its wrapper
  UnknownSharing,  ///< the same, and another wrapped model owns parameters of this one
  Shared,          ///< the same, and another wrapped model owns this parameter
};

enum class GradientAction {
  Reduce,             ///< average it over the ranks
  Accumulate,         ///< add it to .grad, for a later synchronised backward
  AccumulateAndWarn,  ///< the same, but the program probably expects its mean
  LeaveToOther,       ///< it stays in .grad, where this model's next synchronised backward finds it
};

constexpr GradientAction action_for(Forwards forwards, Backward backward) {
  using enum GradientAction;
  constexpr GradientAction kActions[][6] = {
      {Reduce, Reduce, Reduce, Reduce, Reduce, Reduce},
      {Reduce, AccumulateAndWarn, Accumulate, Reduce, AccumulateAndWarn, LeaveToOther},
      {Reduce, AccumulateAndWarn, Accumulate, Accumulate, Accumulate, LeaveToOther},
      {Reduce, AccumulateAndWarn, Accumulate, AccumulateAndWarn, AccumulateAndWarn, LeaveToOther},
  };
  return kActions[static_cast<size_t>(forwards)][static_cast<size_t>(backward)];
}

}  // namespace ddp::detail
