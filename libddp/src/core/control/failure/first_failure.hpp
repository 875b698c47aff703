// SPDX-License-Identifier: Apache-2.0
// The first cause of a generation's failure: its callbacks, its error and its message.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "core/control/failure/failure_cause.hpp"

namespace ddp::detail {

/// `cause` with the exit code that a process really ends with, and 1 instead of 0.
FailureCause with_failing_code(FailureCause cause);

/// The first cause of one generation and the callbacks that it notifies. Any thread.
class FirstFailure {
 public:
  explicit FirstFailure(int64_t generation) : generation_(generation) {}

  /// Stores with_failing_code() as this generation's. Returns false if an earlier cause is set.
  bool set(const FailureCause& cause);
  bool failed() const;
  FailureCause get() const;  ///< a default cause if none is set

  int add_callback(std::function<void(const FailureCause&)> callback);
  /// The callback does not run after this returns, unless it is the caller.
  void remove_callback(int token);
  void remove_callbacks();  ///< the same for all callbacks
  /// Runs every callback once; callbacks added later run at once. Exceptions are logged.
  void run_callbacks();
  bool callbacks_ran() const;

 private:
  void call(const std::function<void(const FailureCause&)>& callback) const;

  const int64_t generation_;
  mutable std::mutex mutex_;
  std::optional<FailureCause> cause_;
  bool ran_ = false;
  // Held while callbacks run, so that removal waits for them. Recursive, so that a callback may
  // remove itself.
  std::recursive_mutex callbacks_mutex_;
  std::map<int, std::function<void(const FailureCause&)>> callbacks_;
  int next_token_ = 1;
};

/// Throws while an exception unwinds in this thread. Its peers do not know of the exception yet, so
/// a destructor that waits for them would deadlock.
void refuse_while_unwinding(const char* operation);

/// The code of an Error; UserException for other exceptions.
ExitCode exit_code_of(const std::exception& exception);

/// Throws the error of the cause's exit code, with the cause's line as the message.
[[noreturn]] void throw_failure(const FailureCause& cause);

/// The message of `cause` with texts cut to the frame limit. try_decode_message() reads it.
std::string encode_cause(FailureCause cause);

}  // namespace ddp::detail

namespace ddp {

inline auto message_fields(FailureCause& cause) {
  return std::tie(cause.rank, cause.step, cause.exit_code, cause.host, cause.where, cause.message);
}

}  // namespace ddp
