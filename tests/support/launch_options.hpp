// SPDX-License-Identifier: Apache-2.0
// What ddp_test_launch was asked to do.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ddp::test {

struct LaunchOptions {
  int ranks = 1;
  double timeout_s = 120;       ///< the whole run; then everything is killed
  double grace_s = 20;          ///< what survivors get after the first unexpected exit
  bool use_mpi = true;          ///< start through mpirun; else torchrun-like variables
  bool need_gpus = false;       ///< skip (77) where fewer GPUs than ranks are seen
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

/// Throws std::runtime_error with one sentence where the arguments make no sense.
LaunchOptions parse_launch_options(int argc, char** argv);

}  // namespace ddp::test
