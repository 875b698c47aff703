// SPDX-License-Identifier: Apache-2.0
// Options of ddp_test_launch.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ddp::test {

struct LaunchOptions {
  int ranks = 1;
  double timeout_s = 120;       ///< for the whole run; then all processes are killed
  double grace_s = 20;          ///< for the survivors after the first unexpected exit
  bool use_mpi = true;          ///< start through mpirun; else torchrun-like variables
  bool need_gpus = false;       ///< skip (77) if there are fewer GPUs than ranks
  bool verbose = false;         ///< print every rank's output, also on success
  std::string skip_reason;      ///< not empty: skip (77) with this sentence, start nothing
  std::map<int, int> expected;  ///< exit code by rank; default_expected elsewhere
  int default_expected = 0;
  std::vector<std::pair<int, std::string>> expected_output;  ///< rank, text its output must hold
  std::vector<std::string> command;

  int expected_exit(int rank) const {
    const auto found = expected.find(rank);
    return found == expected.end() ? default_expected : found->second;
  }
};

/// The exit code that means "skipped" to CTest (SKIP_RETURN_CODE).
inline constexpr int kSkipped = 77;

/// Throws std::runtime_error with one sentence for invalid arguments.
LaunchOptions parse_launch_options(int argc, char** argv);

}  // namespace ddp::test
