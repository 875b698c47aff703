// SPDX-License-Identifier: Apache-2.0
#include "support/launch_wrapper.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace ddp::test {
namespace {

constexpr int kWrapperFailed = 125;

std::string own_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK"}) {
    if (const char* text = std::getenv(name); text != nullptr) {
      return text;
    }
  }
  return "0";
}

int connect_to_launcher(const char* path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    std::perror("ddp_test_launch: connect");
    std::exit(kWrapperFailed);
  }
  return fd;
}

void send_line(int fd, const std::string& line) {
  // A dead launcher shows as end of file in the poll below.
  [[maybe_unused]] const auto sent = send(fd, line.data(), line.size(), MSG_NOSIGNAL);
}

[[noreturn]] void exec_program(const std::string& log, pid_t wrapper, char** command) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != wrapper) {
    _exit(kWrapperFailed);
  }
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const int in = open("/dev/null", O_RDONLY);
  if (out < 0 || in < 0) {
    _exit(kWrapperFailed);
  }
  dup2(in, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(out, STDERR_FILENO);
  execvp(command[0], command);
  std::fprintf(stderr, "cannot start %s: %s\n", command[0], std::strerror(errno));
  _exit(127);
}

int exit_code_of(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int run_wrapper(int argc, char** argv) {
  if (argc < 6) {
    return kWrapperFailed;
  }
  const std::string rank = own_rank();
  const int launcher = connect_to_launcher(argv[2]);
  // Signals are for the program. The wrapper ends with its launcher at the latest.
  signal(SIGINT, SIG_IGN);
  const pid_t self = getpid();
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGINT, SIG_DFL);
    exec_program(argv[3] + rank, self, argv + 5);
  }
  send_line(launcher, "start " + rank + " " + std::to_string(child) + "\n");
  const int child_fd = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  pollfd watched[2] = {{child_fd, POLLIN, 0}, {launcher, POLLIN, 0}};
  while (poll(watched, 2, -1) < 0 && errno == EINTR) {
  }
  if (watched[0].revents == 0) {  // the launcher is gone
    kill(child, SIGKILL);
  }
  send_line(launcher, "exit " + rank + " " + std::to_string(exit_code_of(child)) + "\n");
  char byte = 0;
  while (read(launcher, &byte, 1) < 0 && errno == EINTR) {
  }
  return 0;
}

}  // namespace ddp::test
