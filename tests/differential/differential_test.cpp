// SPDX-License-Identifier: Apache-2.0
// Every op and optimizer on random inputs, compared with its definition in float64: odd sizes,
// strides, offsets and dtypes, autocast, alone, under the wrapper, recomputed. Each run has other
// cases. A failure prints the number of its case:
//
//   DDP_DIFFERENTIAL_CASE=NUMBER   runs this case alone
//   DDP_DIFFERENTIAL_SECONDS=N     new cases for N seconds in each of the two tests; otherwise 8
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>

#include "differential/cases.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

namespace {

using differential::Draw;

/// Calls `run` with the number of each case until the time is over.
template <typename Run>
void for_each_case(const char* what, const Run& run) {
  at::globalContext().setAllowTF32CuDNN(false);
  if (const char* only = std::getenv("DDP_DIFFERENTIAL_CASE")) {
    run(std::strtoull(only, nullptr, 10));
    return;
  }
  const char* seconds = std::getenv("DDP_DIFFERENTIAL_SECONDS");
  const std::chrono::duration<double> budget(seconds != nullptr ? std::atof(seconds) : 8);
  const auto begin = std::chrono::steady_clock::now();
  // A build's test on the CPU repeats the same cases. GPU runs, and runs of a chosen time, draw new
  // ones.
  const bool draws_new = seconds != nullptr || ddp::test::context().device().is_cuda();
  const uint64_t first = draws_new ? std::random_device{}() : 1;
  std::cout << what << " from DDP_DIFFERENTIAL_CASE=" << first << std::endl;
  uint64_t number = first;
  while (std::chrono::steady_clock::now() - begin < budget) {
    run(number++);
  }
  std::cout << number - first << " cases of " << what << "\n";
}

std::string repeat(uint64_t number) {
  return "; to repeat: DDP_DIFFERENTIAL_CASE=" + std::to_string(number);
}

/// The largest errors so far, each by its tolerance.
class Worst {
 public:
  ~Worst() {
    for (const auto& [name, error] : errors_) {
      std::cout << "  " << name << ": at most " << error << " of the tolerance\n";
    }
  }
  double* of(const std::string& name) { return &errors_[name]; }

 private:
  std::map<std::string, double> errors_;
};

}  // namespace

TEST_CASE("ops equal their definitions in float64") {
  auto rows = differential::language_rows();
  rows.insert(rows.end(), differential::vision_rows().begin(), differential::vision_rows().end());
  Worst worst;
  for_each_case("ops", [&](uint64_t number) {
    const auto& row = rows[number % rows.size()];
    INFO(row.name << repeat(number));  // shown if a signal ends the process
    Draw draw(number, ddp::test::context().device());
    std::string text, difference;
    try {
      const auto one = row.make(draw);
      text = one.text;
      difference = check(one, draw, worst.of(row.name));
    } catch (const std::exception& error) {
      difference = error.what();
    }
    if (!difference.empty()) {
      FAIL(row.name << " of " << text << "\n  " << difference);
    }
  });
}

TEST_CASE("optimizers equal their rules in float64") {
  Worst worst;
  for_each_case("optimizers", [&](uint64_t number) {
    INFO("optimizer" << repeat(number));
    Draw draw(number, ddp::test::context().device());
    std::string text, difference;
    try {
      difference = differential::check_optimizer(draw, &text, worst.of("parameters"));
    } catch (const std::exception& error) {
      difference = error.what();
    }
    if (!difference.empty()) {
      FAIL(text << "\n  " << difference);
    }
  });
}
