// SPDX-License-Identifier: Apache-2.0
// The first cause of a failure and who wants to hear of it. Thread safe.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

class FailureBox {
 public:
  /// False where an earlier cause is known already.
  bool set(const FailureCause& cause);
  bool failed() const;
  FailureCause get() const;  ///< a default cause where there is none

  int add_callback(std::function<void(const FailureCause&)> callback);
  /// The callback does not run any more when this returns (unless it is the caller).
  void remove_callback(int token);
  void remove_callbacks();  ///< all of them, in the same way
  /// Runs every callback, once; later additions run at once. Callbacks that throw are logged.
  void run_callbacks();
  bool callbacks_ran() const;

 private:
  void call(const std::function<void(const FailureCause&)>& callback) const;

  mutable std::mutex mutex_;
  std::optional<FailureCause> cause_;
  bool ran_ = false;
  // Held while callbacks run, so that removing one waits for it; recursive, so that one may remove
  // itself.
  std::recursive_mutex callbacks_mutex_;
  std::map<int, std::function<void(const FailureCause&)>> callbacks_;
  int next_token_ = 1;
};

/// Throws the error that belongs to the cause's exit code, saying its line.
[[noreturn]] void throw_failure(const FailureCause& cause);

std::string encode_cause(const FailureCause& cause);
bool decode_cause(std::string_view bytes, FailureCause& cause);

}  // namespace ddp::detail
