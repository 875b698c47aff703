// SPDX-License-Identifier: Apache-2.0
// What follows a failure, decided in one place. A failure ends its generation on every rank: waits
// throw the cause, and communicators abort. What then becomes of the processes is the policy's
// answer, which every part that reacts asks for.
#pragma once

#include <chrono>
#include <optional>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/membership.hpp"

namespace ddp::detail {

/// The end of this process.
struct JobEnd {
  ExitCode exit_code = ExitCode::UserException;
  /// The process leaves without cleaning up after this time.
  std::chrono::milliseconds exit_within{};
};

/// Today's only policy: the job ends, on all ranks with the first cause's code. The ranks of a
/// generation have the same first cause, so their answers agree.
JobEnd job_end_after(const FailureCause& failure, const Membership& membership);

/// The same for the failure of `control_plane`; nothing if its ranks have not failed.
std::optional<JobEnd> job_end_of(const ControlPlane& control_plane);

}  // namespace ddp::detail
