// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace ddp {

struct FailureCause;

namespace detail {

/// How the library's parts learn of the job's first failure. Any thread.
class FailureReports {
 public:
  virtual ~FailureReports() = default;
  /// Reports a failure to all ranks. Only the job's first cause counts.
  virtual void publish_failure(const FailureCause& cause) = 0;
  virtual bool failed() const = 0;
  /// The first cause, once known.
  virtual FailureCause failure() const = 0;
  /// Calls `callback` once, on the background thread, when a failure becomes known. Communicators
  /// abort here so that no thread stays in a collective. Returns a token for
  /// remove_failure_callback.
  virtual int add_failure_callback(std::function<void(const FailureCause&)> callback) = 0;
  virtual void remove_failure_callback(int token) = 0;
};

}  // namespace detail
}  // namespace ddp
