// SPDX-License-Identifier: Apache-2.0
// Reports to a Context from objects that outlast a move of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ddp/comm/context.hpp"

namespace ddp::detail {

/// Refers to the Context's state, which stays in place when the Context moves. The Context that
/// holds the state must outlive the handle.
class ContextHandle {
 public:
  explicit ContextHandle(const Context& context) : state_(context.state_.get()) {}
  /// The same as Context::set_progress.
  void set_progress(int64_t step, const std::string& where) const;
  /// Records a failure to throw at the end of the job, for destructors, which cannot throw. All
  /// ranks record the same failure; the first one counts.
  void defer_failure(const FailureCause& cause) const;
  /// Ends the Context in order and meets again: the ranks with `stays` are the next generation, in
  /// the order of their ranks. Collective over the ranks of the Context, which is closed then.
  /// Returns nothing on ranks that leave.
  std::optional<Context> meet_again(const ContextOptions& options, bool stays) const;
  /// Publishes a recorded failure and throws the Error of its exit code. ddp::run calls it after
  /// the training function; Context::close() calls it first.
  void throw_deferred_failure() const;

 private:
  Context::State* state_;
};

}  // namespace ddp::detail
