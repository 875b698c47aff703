// SPDX-License-Identifier: Apache-2.0
// What this process still does when the program calls exit() or returns from main(). Threads of
// libddp and objects on the stack exist until then, but their destructors do not run.
#pragma once

#include <functional>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Calls `action` with the process's exit status when exit() runs, in reverse order with other
/// actions, functions of atexit() and destructors of static objects. So whatever an action uses
/// must be used once before this call. A child of fork() calls no action. `action` must not throw.
void at_exit(std::function<void(int status)> action);

/// The process ends with `code` if its own exit status is 0. Only during exit(); the first call
/// counts.
void replace_success(ExitCode code);

}  // namespace ddp::detail
