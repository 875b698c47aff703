// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/stop_signal.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "core/launch/report_signal.hpp"
#include "support/catch.hpp"

namespace ddp {
namespace {

template <typename F>
int exit_status_of(F&& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    for (const int number : {SIGTERM, SIGUSR1, SIGINT, SIGUSR2}) {
      signal(number, SIG_DFL);  // Catch2 has its own handlers
    }
    child();
    _exit(99);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

}  // namespace

TEST_CASE("Ctrl-C leaves errno as the interrupted code had it") {
  const int status = exit_status_of([] {
    const StopSignalHandlers handlers;
    close(STDERR_FILENO);  // the handler's own write fails
    errno = ENOENT;
    raise(SIGINT);
    _exit(errno == ENOENT ? 0 : 1);
  });
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("SIGUSR2 asks for a report where the program does not use it") {
  const int status = exit_status_of([] {
    const StopSignalHandlers handlers;
    const StopSignalHandlers again;  // its own handler is none of the program
    raise(SIGUSR2);
    if (!detail::take_report_request()) _exit(1);
    _exit(stop_requested() ? 2 : 0);
  });
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("the program's own handler of SIGUSR2 stays") {
  const int status = exit_status_of([] {
    for (const auto handler : {SIG_IGN, +[](int) { write(STDOUT_FILENO, "", 0); }}) {
      signal(SIGUSR2, handler);
      {
        const StopSignalHandlers handlers;
        if (signal(SIGUSR2, handler) != handler) _exit(1);
        raise(SIGUSR2);
        if (detail::take_report_request()) _exit(2);
      }
      if (signal(SIGUSR2, handler) != handler) _exit(3);
    }
    _exit(0);
  });
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a signal only sets the flag, and the old handlers come back") {
  const int status = exit_status_of([] {
    {
      StopSignalHandlers handlers;
      if (stop_requested()) _exit(1);
      raise(SIGUSR1);
      raise(SIGTERM);
      raise(SIGTERM);
      if (!stop_requested()) _exit(2);
      clear_stop_request();
      if (stop_requested()) _exit(3);
    }
    raise(SIGTERM);
  });
  CHECK(WIFSIGNALED(status));
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM));
}

TEST_CASE("the second Ctrl-C leaves at once") {
  const int status = exit_status_of([] {
    close(STDERR_FILENO);
    StopSignalHandlers handlers;
    raise(SIGINT);
    if (!stop_requested()) _exit(1);
    raise(SIGINT);
  });
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGINT));
}

}  // namespace ddp
