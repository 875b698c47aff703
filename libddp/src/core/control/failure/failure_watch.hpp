// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "core/control/failure/exit_deadline.hpp"
#include "core/control/failure/failure_policy.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Arms the exit deadline of one generation as soon as any of its ranks fails, even if this rank is
/// busy. Destroying the watch disarms the deadline.
class FailureWatch {
 public:
  explicit FailureWatch(ControlPlane& plane)
      : plane_(plane), token_(plane.add_failure_callback([this](const FailureCause& cause) {
          deadline_.arm(job_end_after(cause, plane_.membership()));
        })) {}
  ~FailureWatch() { detach(); }
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  /// Call before the control plane is destroyed. The deadline of a failed generation stays armed.
  void detach() {
    if (!token_) {
      return;
    }
    if (const auto end = job_end_of(plane_)) {
      deadline_.arm(*end);  // the callback may not have run yet
    }
    plane_.remove_failure_callback(*token_);
    token_.reset();
  }

 private:
  ControlPlane& plane_;
  ExitDeadline deadline_;
  std::optional<int> token_;  // last: the callback uses the deadline
};

}  // namespace ddp::detail
