// SPDX-License-Identifier: Apache-2.0
#include "core/control/failure/exit_actions.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <utility>

namespace ddp::detail {
namespace {

std::atomic<int> code_instead_of_success{0};

// exit() cannot change its status, so the process ends here: after all actions and the destructors
// of the program's static objects, which are registered later than this function.
void end_with_replaced_code(int status, void*) {
  const int code = code_instead_of_success;
  if ((status & 0xff) == 0 && code != 0) {
    std::cout.flush();
    std::fflush(nullptr);
    _exit(code);
  }
}

const int is_registered [[maybe_unused]] = on_exit(end_with_replaced_code, nullptr);

struct ExitAction {
  pid_t pid;
  std::function<void(int)> action;
};

}  // namespace

void at_exit(std::function<void(int status)> action) {
  const auto run = [](int status, void* given) {
    const auto* exit_action = static_cast<const ExitAction*>(given);
    if (getpid() == exit_action->pid) {
      exit_action->action(status);
    }
  };
  // Never freed, because exit() may run in several threads.
  on_exit(run, new ExitAction{getpid(), std::move(action)});
}

void replace_success(ExitCode code) {
  int none = 0;
  code_instead_of_success.compare_exchange_strong(none, static_cast<int>(code));
}

}  // namespace ddp::detail
