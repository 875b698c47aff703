// SPDX-License-Identifier: Apache-2.0
// ddp_test_launch: runs a program as several ranks and observes each rank's exit code itself.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <sstream>

#include "support/launch_options.hpp"
#include "support/launch_processes.hpp"
#include "support/launch_run.hpp"
#include "support/launch_wrapper.hpp"

namespace ddp::test {
namespace {

constexpr const char* kUsage = R"(usage:
  ddp_test_launch --ranks 4 --timeout 60 -- build/bin/reducer_test
  ddp_test_launch --ranks 3 --expect-exit '1:137,*:76' --expect-output '0:rank 1' -- fault kill

  --ranks N             number of ranks
  --timeout S           for the whole run; then all processes are killed and the run fails
  --grace S             time for the other ranks after the first unexpected exit (20)
  --expect-exit LIST    rank:code,… with * for all other ranks; a signal gives 128 + its number
  --expect-output R:TEXT  rank R's output must hold TEXT (repeatable)
  --launch mpi|env      mpirun (default), or torchrun's variables without a launcher
  --gpus                as --launch env; exit 77 (skipped) if there are fewer GPUs than ranks
  --skip WHY            start nothing and exit 77: a feature that this build lacks
  --verbose             print the output of all ranks, also on success

Without --expect-exit every rank must exit with 0. Ranks that exit with 77 were skipped, and so
was the run. With DDP_REQUIRE_GPUS=n a run that needs at most n GPUs fails instead of being
skipped. Each run has its own folder (DDP_TEST_FOLDER) and port, and leaves no files or
processes.
)";

void print_with_prefix(const std::string& prefix, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::cout << prefix << line << "\n";
  }
}

int required_gpus() {
  const char* text = std::getenv("DDP_REQUIRE_GPUS");
  return text == nullptr ? 0 : std::atoi(text);
}

std::string describe(const RankResult& result) {
  if (!result.exit_code) {
    return result.pid == 0 ? "never started" : "did not end by itself";
  }
  const int code = *result.exit_code;
  const std::string text = "exit code " + std::to_string(code);
  return code > 128 && code < 128 + 65 ? text + " (" + strsignal(code - 128) + ")" : text;
}

// Prints each complaint; returns their number.
int check_results(const LaunchOptions& options, const LaunchRun& run) {
  int complaints = 0;
  const auto complain = [&](const std::string& text) {
    std::cout << "ddp_test_launch: " << text << "\n";
    ++complaints;
  };
  if (!run.cut_short().empty()) {
    complain(run.cut_short());
  }
  for (int rank = 0; rank < options.ranks; ++rank) {
    const auto& result = run.results()[static_cast<std::size_t>(rank)];
    const int expected = options.expected_exit(rank);
    if (!result.exit_code || *result.exit_code != expected) {
      complain("rank " + std::to_string(rank) + ": " + describe(result) + ", expected " +
               std::to_string(expected));
    }
  }
  for (const auto& [rank, text] : options.expected_output) {
    if (run.output_of(rank).find(text) == std::string::npos) {
      complain("rank " + std::to_string(rank) + " did not print \"" + text + "\"");
    }
  }
  for (const auto& command : run.leftovers()) {
    complain("a process outlived the ranks: " + command);
  }
  return complaints;
}

bool was_skipped(const LaunchRun& run) {
  bool skipped = false;
  for (const auto& result : run.results()) {
    if (!result.exit_code || (*result.exit_code != kSkipped && *result.exit_code != 0)) {
      return false;
    }
    skipped = skipped || *result.exit_code == kSkipped;
  }
  return skipped;
}

int skip(const LaunchOptions& options, const std::string& why) {
  if (options.need_gpus && required_gpus() >= options.ranks) {
    std::cout << "ddp_test_launch: DDP_REQUIRE_GPUS=" << required_gpus() << ", but " << why << "\n";
    return 1;
  }
  std::cout << "ddp_test_launch: skipped: " << why << "\n";
  return kSkipped;
}

int launch(const LaunchOptions& options) {
  if (!options.skip_reason.empty()) {
    return skip(options, options.skip_reason);
  }
  if (const int seen = visible_gpus(); options.need_gpus && seen < options.ranks) {
    return skip(options, std::to_string(options.ranks) + " GPUs are needed and " +
                             std::to_string(seen) + " seen");
  }
  LaunchRun run(options);
  run.run();
  const bool skipped = options.expected.empty() && was_skipped(run);
  const int complaints = skipped ? 0 : check_results(options, run);
  if (complaints > 0 || skipped || options.verbose) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      print_with_prefix("[" + std::to_string(rank) + "] ", run.output_of(rank));
    }
  }
  if (complaints > 0) {
    print_with_prefix("[launcher] ", run.launcher_output());
  }
  return skipped ? skip(options, "a rank ended with 77") : complaints > 0 ? 1 : 0;
}

}  // namespace
}  // namespace ddp::test

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--wrap") == 0) {
    return ddp::test::run_wrapper(argc, argv);
  }
  if (argc > 1 && std::strcmp(argv[1], "--help") == 0) {
    std::cout << ddp::test::kUsage;
    return 0;
  }
  try {
    return ddp::test::launch(ddp::test::parse_launch_options(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "ddp_test_launch: " << error.what() << "\n";
    return 2;
  }
}
