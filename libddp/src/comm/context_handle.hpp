// SPDX-License-Identifier: Apache-2.0
// Reports to a Context from objects that outlast a move of it.
#pragma once

#include <cstdint>
#include <string>

#include "ddp/comm/context.hpp"

namespace ddp::detail {

/// Refers to the Context's state, which stays in place when the Context moves. The Context that
/// holds the state must outlive the handle.
class ContextHandle {
 public:
  explicit ContextHandle(const Context& context) : state_(context.state_.get()) {}
  /// The same as the Context's methods of these names.
  void set_progress(int64_t step, const std::string& where) const;
  void defer_failure(const FailureCause& cause) const;

 private:
  Context::State* state_;
};

}  // namespace ddp::detail
