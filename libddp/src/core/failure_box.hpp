// SPDX-License-Identifier: Apache-2.0
// The first cause of a failure and the callbacks to notify. Thread safe.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "core/failure_cause.hpp"

namespace ddp::detail {

class FailureBox {
 public:
  /// False if an earlier cause is already set.
  bool set(const FailureCause& cause);
  bool failed() const;
  FailureCause get() const;  ///< a default cause if none is set

  int add_callback(std::function<void(const FailureCause&)> callback);
  /// After this returns, the callback does not run any more (unless it is the caller).
  void remove_callback(int token);
  void remove_callbacks();  ///< removes all, likewise
  /// Runs every callback once; callbacks added later run at once. Exceptions are logged.
  void run_callbacks();
  bool callbacks_ran() const;

 private:
  void call(const std::function<void(const FailureCause&)>& callback) const;

  mutable std::mutex mutex_;
  std::optional<FailureCause> cause_;
  bool ran_ = false;
  // Held while callbacks run, so that removal waits for them. Recursive, so that a callback may
  // remove itself.
  std::recursive_mutex callbacks_mutex_;
  std::map<int, std::function<void(const FailureCause&)>> callbacks_;
  int next_token_ = 1;
};

/// Throws the error of the cause's exit code, with the cause's line as the message.
[[noreturn]] void throw_failure(const FailureCause& cause);

std::string encode_cause(const FailureCause& cause);
bool decode_cause(std::string_view bytes, FailureCause& cause);

}  // namespace ddp::detail
