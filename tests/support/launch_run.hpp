// SPDX-License-Identifier: Apache-2.0
// One run of several ranks: starts and observes them, and cleans up.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "support/launch_options.hpp"

namespace ddp::test {

struct RankResult {
  pid_t pid = 0;                 ///< the program's, 0 before it starts
  std::optional<int> exit_code;  ///< 128 + signal if killed by one; none: killed by this run
};

class LaunchRun {
 public:
  /// Creates the run's own temporary folder, its socket and, without mpirun, its port.
  explicit LaunchRun(const LaunchOptions& options);
  /// Kills all remaining processes of the run and removes its folders.
  ~LaunchRun();
  LaunchRun(const LaunchRun&) = delete;
  LaunchRun& operator=(const LaunchRun&) = delete;

  /// Starts the ranks. Returns when all have ended, the time is up, or a signal stops the launcher.
  void run();

  const std::vector<RankResult>& results() const { return results_; }
  std::string output_of(int rank) const;
  /// The output of mpirun itself.
  std::string launcher_output() const;
  /// The reason why the run was cut short; empty if it ended by itself.
  const std::string& cut_short() const { return cut_short_; }
  /// Processes that outlived their rank.
  const std::vector<std::string>& leftovers() const { return leftovers_; }

 private:
  struct Connection {
    int fd = -1;
    std::string received;
  };

  void set_environment() const;
  void start_mpirun();
  void start_directly();
  pid_t spawn(const std::vector<std::string>& command,
              const std::vector<std::pair<std::string, std::string>>& environment) const;
  std::vector<std::string> wrapped_command() const;
  void watch();
  void accept_and_read(int timeout_ms);
  void handle_line(const std::string& line);
  void check_limits();
  bool all_ended() const;
  void release_wrappers();
  void kill_descendants(bool record_programs);

  const LaunchOptions& options_;
  std::string folder_;
  std::string shm_folder_;  ///< MPI's shared memory; empty if /dev/shm is not writable
  int listener_ = -1;
  int port_holder_ = -1;
  int port_ = 0;
  std::vector<Connection> connections_;
  std::vector<pid_t> children_;
  std::vector<RankResult> results_;
  std::vector<std::string> leftovers_;
  std::string cut_short_;
  std::chrono::steady_clock::time_point started_;
  std::optional<std::chrono::steady_clock::time_point> first_bad_exit_;
};

}  // namespace ddp::test
