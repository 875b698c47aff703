// SPDX-License-Identifier: Apache-2.0
#include "support/launch_run.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "support/launch_processes.hpp"

#ifndef DDP_MPIEXEC
#define DDP_MPIEXEC "mpirun"
#endif

namespace ddp::test {
namespace {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t stop_signal = 0;

std::string make_folder(const std::string& parent) {
  std::string name = parent + "/ddp_test_XXXXXX";
  return mkdtemp(name.data()) == nullptr ? std::string() : name;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string random_secret() {
  std::random_device device;
  std::ostringstream text;
  for (int i = 0; i < 8; ++i) {
    text << std::hex << device();
  }
  return text.str();
}

int listen_at(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd, 1024) != 0) {
    throw std::runtime_error("cannot listen at " + path + ": " + std::strerror(errno));
  }
  return fd;
}

// Reserves a port: the socket is bound but never listens. No other test gets the port, and rank 0
// may still listen there, because it sets SO_REUSEADDR too.
int hold_port(int& port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::runtime_error(std::string("cannot reserve a port: ") + std::strerror(errno));
  }
  port = ntohs(address.sin_port);
  return fd;
}

// Hides a surrounding job (Slurm, torchrun, mpirun) from the ranks.
void drop_launcher_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    for (const char* prefix : {"SLURM_", "PMIX_", "PMI_", "OMPI_COMM_", "TORCHELASTIC_"}) {
      if (name.rfind(prefix, 0) == 0) {
        names.push_back(name);
      }
    }
  }
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                           "MASTER_PORT", "GROUP_RANK", "DDP_SECRET"}) {
    names.emplace_back(name);
  }
  for (const auto& name : names) {
    unsetenv(name.c_str());
  }
}

}  // namespace

LaunchRun::LaunchRun(const LaunchOptions& options)
    : options_(options), results_(options.ranks), started_(Clock::now()) {
  // Uses /tmp instead of TMPDIR, because the path must fit into a socket's name.
  folder_ = make_folder("/tmp");
  if (folder_.empty()) {
    throw std::runtime_error("cannot make a folder in /tmp");
  }
  shm_folder_ = make_folder("/dev/shm");
  listener_ = listen_at(folder_ + "/socket");
  if (!options.use_mpi) {
    port_holder_ = hold_port(port_);
  }
  // Orphans of the ranks become children of this process, so that all can be killed.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    signal(number, [](int received) { stop_signal = received; });
  }
}

LaunchRun::~LaunchRun() {
  kill_descendants(false);
  for (const auto& connection : connections_) {
    close(connection.fd);
  }
  close(listener_);
  if (port_holder_ >= 0) {
    close(port_holder_);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
  if (!shm_folder_.empty()) {
    std::filesystem::remove_all(shm_folder_, ignored);
  }
}

void LaunchRun::run() {
  drop_launcher_variables();
  set_environment();
  if (options_.use_mpi) {
    start_mpirun();
  } else {
    start_directly();
  }
  watch();
  kill_descendants(true);
}

void LaunchRun::set_environment() const {
  const auto set = [](const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
  };
  std::filesystem::create_directory(folder_ + "/tmp");
  set("TMPDIR", folder_ + "/tmp");
  set("DDP_TEST_FOLDER", folder_ + "/tmp");
  set("DDP_TEST_DEVICE", options_.need_gpus ? "cuda" : "cpu");
  set("OMP_NUM_THREADS", "1");
  if (options_.need_gpus) {
    setenv("NCCL_NVLS_ENABLE", "0", 0);
  }
  // More ranks than cores share them. MPI neither leaves the machine nor outlives the run.
  set("OMPI_ALLOW_RUN_AS_ROOT", "1");
  set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  set("OMPI_MCA_rmaps_base_oversubscribe", "1");
  set("OMPI_MCA_mpi_yield_when_idle", "1");
  set("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
  if (!shm_folder_.empty()) {
    set("OMPI_MCA_btl_vader_backing_directory", shm_folder_);
  }
}

std::vector<std::string> LaunchRun::wrapped_command() const {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                                      "--wrap", folder_ + "/socket", folder_ + "/rank", "--"};
  command.insert(command.end(), options_.command.begin(), options_.command.end());
  return command;
}

pid_t LaunchRun::spawn(const std::vector<std::string>& command,
                       const std::vector<std::pair<std::string, std::string>>& environment) const {
  const pid_t launcher = getpid();
  const pid_t child = fork();
  if (child != 0) {
    return child;
  }
  setpgid(0, 0);  // a terminal's Ctrl-C reaches only the launcher
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) {
    _exit(127);
  }
  for (const auto& [name, value] : environment) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  const int out = open((folder_ + "/launcher").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const int in = open("/dev/null", O_RDONLY);
  dup2(in, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(out, STDERR_FILENO);
  std::vector<char*> arguments;
  for (const auto& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  dprintf(STDERR_FILENO, "cannot start %s: %s\n", arguments[0], std::strerror(errno));
  _exit(127);
}

void LaunchRun::start_mpirun() {
  std::vector<std::string> command = {DDP_MPIEXEC, "--quiet", "-n", std::to_string(options_.ranks),
                                      "--bind-to", "none"};
  const auto wrapped = wrapped_command();
  command.insert(command.end(), wrapped.begin(), wrapped.end());
  children_.push_back(spawn(command, {}));
}

void LaunchRun::start_directly() {
  const std::string secret = random_secret();
  const std::string ranks = std::to_string(options_.ranks);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const std::string text = std::to_string(rank);
    children_.push_back(spawn(wrapped_command(), {{"RANK", text},
                                                  {"LOCAL_RANK", text},
                                                  {"WORLD_SIZE", ranks},
                                                  {"LOCAL_WORLD_SIZE", ranks},
                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                  {"MASTER_PORT", std::to_string(port_)},
                                                  {"DDP_SECRET", secret}}));
  }
}

void LaunchRun::watch() {
  while (!all_ended() && cut_short_.empty()) {
    accept_and_read(20);
    check_limits();
  }
  release_wrappers();
  // mpirun needs a moment to clean up after ranks that did not finalize; it gets no longer than
  // this.
  const auto deadline = Clock::now() + std::chrono::seconds(cut_short_.empty() ? 5 : 0);
  while (!children_.empty() && Clock::now() < deadline) {
    children_.erase(
        std::remove_if(children_.begin(), children_.end(),
                       [](pid_t child) { return waitpid(child, nullptr, WNOHANG) != 0; }),
        children_.end());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void LaunchRun::accept_and_read(int timeout_ms) {
  std::vector<pollfd> watched = {{listener_, POLLIN, 0}};
  for (const auto& connection : connections_) {
    watched.push_back({connection.fd, POLLIN, 0});
  }
  if (poll(watched.data(), watched.size(), timeout_ms) <= 0) {
    return;
  }
  for (std::size_t i = 1; i < watched.size(); ++i) {
    if (watched[i].revents == 0) {
      continue;
    }
    char buffer[256];
    auto& connection = connections_[i - 1];
    const auto count = read(connection.fd, buffer, sizeof(buffer));
    if (count <= 0) {
      close(connection.fd);
      connection.fd = -1;  // poll ignores it from here
      continue;
    }
    connection.received.append(buffer, static_cast<std::size_t>(count));
    for (auto end = connection.received.find('\n'); end != std::string::npos;
         end = connection.received.find('\n')) {
      handle_line(connection.received.substr(0, end));
      connection.received.erase(0, end + 1);
    }
  }
  if (watched[0].revents != 0) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) {
      connections_.push_back({fd, {}});
    }
  }
}

void LaunchRun::handle_line(const std::string& line) {
  std::istringstream words(line);
  std::string what;
  int rank = -1;
  int value = 0;
  words >> what >> rank >> value;
  if (rank < 0 || rank >= options_.ranks) {
    return;
  }
  auto& result = results_[static_cast<std::size_t>(rank)];
  if (what == "start") {
    result.pid = value;
  } else {
    result.exit_code = value;
    if (value != options_.expected_exit(rank) && !first_bad_exit_) {
      first_bad_exit_ = Clock::now();
    }
  }
}

void LaunchRun::check_limits() {
  const auto now = Clock::now();
  const std::chrono::duration<double> elapsed = now - started_;
  if (stop_signal != 0) {
    cut_short_ = std::string("stopped by signal ") + strsignal(stop_signal);
  } else if (elapsed.count() > options_.timeout_s) {
    cut_short_ = "not ended within " + std::to_string(static_cast<int>(options_.timeout_s)) + " s";
  } else if (first_bad_exit_ &&
             std::chrono::duration<double>(now - *first_bad_exit_).count() > options_.grace_s) {
    cut_short_ = "not ended within " + std::to_string(static_cast<int>(options_.grace_s)) +
                 " s after the first failure";
  }
  // An mpirun that has exited takes its ranks along: they will never report.
  for (const pid_t child : children_) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      accept_and_read(0);
      children_.erase(std::find(children_.begin(), children_.end(), child));
      if (!all_ended() && children_.empty()) {
        cut_short_ =
            "the launcher ended before its ranks (exit status " +
            std::to_string(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)) + ")";
      }
      return;
    }
  }
}

bool LaunchRun::all_ended() const {
  return std::all_of(results_.begin(), results_.end(),
                     [](const RankResult& result) { return result.exit_code.has_value(); });
}

void LaunchRun::release_wrappers() {
  for (auto& connection : connections_) {
    if (connection.fd >= 0) {
      shutdown(connection.fd, SHUT_RDWR);
    }
  }
}

// Kills all descendants, repeatedly: a killed process can leave new orphans.
void LaunchRun::kill_descendants(bool record_programs) {
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  bool first = true;
  while (Clock::now() < deadline) {
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const auto alive = descendants(getpid());
    if (alive.empty()) {
      break;
    }
    for (const auto& process : alive) {
      // A helper of mpirun may still be exiting; children of a rank must be gone by now.
      if (record_programs && first && cut_short_.empty() && !process.is_launcher) {
        leftovers_.push_back(process.command);
      }
      kill(process.pid, SIGKILL);
    }
    first = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  children_.clear();
}

std::string LaunchRun::output_of(int rank) const {
  return read_text(folder_ + "/rank" + std::to_string(rank));
}

std::string LaunchRun::launcher_output() const {
  return read_text(folder_ + "/launcher");
}

}  // namespace ddp::test
