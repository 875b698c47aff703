// SPDX-License-Identifier: Apache-2.0
#include "core/control/failure/failure_policy.hpp"

namespace ddp::detail {
namespace {

constexpr std::chrono::seconds kUnwindGrace{10};
constexpr std::chrono::seconds kStopGrace{3};  // nothing is unwound that a restart needs

}  // namespace

JobEnd job_end_after(const FailureCause& failure, const Membership&) {
  const bool is_stop = failure.exit_code == ExitCode::SavedRequeue;
  return {failure.exit_code, is_stop ? kStopGrace : kUnwindGrace};
}

std::optional<JobEnd> job_end_of(const ControlPlane& control_plane) {
  if (!control_plane.failed()) {
    return std::nullopt;
  }
  return job_end_after(control_plane.failure(), control_plane.membership());
}

}  // namespace ddp::detail
