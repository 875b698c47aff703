// SPDX-License-Identifier: Apache-2.0
// Writes rows as a run does, for tensorboard_files.py:
//   tensorboard_tool DIR <steps done> <last step> <steps between rows>
#include <cmath>
#include <cstdlib>
#include <string>

#include "train/metrics/files/metrics_files.hpp"

using ddp::detail::JobNumbers;
using ddp::detail::MetricsFiles;

namespace {

constexpr int kStepsPerEpoch = 20;
constexpr auto kSettings =
    "* train.epochs   2 epochs\n"
    "  model.name     resnet18\n"
    "  train.nesterov true\n"
    "* lr.lr          0.05\n"
    "  metrics.csv    true\n"
    "  data.path      a|b\n"
    "  data.name      inf\n"
    "  data.title     2 of 3\n";

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    return 64;
  }
  ddp::MetricsOptions options;
  options.dir = argv[1];
  options.run_name = "run";
  options.tensorboard = true;
  options.run.settings_text = kSettings;
  const int64_t done = std::atoi(argv[2]), last = std::atoi(argv[3]), every = std::atoi(argv[4]);
  MetricsFiles files(options, {}, /*is_main=*/true);
  files.begin(done);
  for (int64_t step = done + 1; step <= last; ++step) {
    const auto x = static_cast<double>(step);
    if (step % every == 0) {  // a start's losses differ from those of the start before
      files.add_step(
          {.step = step, .loss = step == 14 ? NAN : 1 / x + static_cast<double>(done), .lr = 0.1});
    }
    if (step % kStepsPerEpoch == kStepsPerEpoch / 2) {
      files.add_evaluation({.done = step, .loss = x / 2});
    }
    if (step % kStepsPerEpoch == 0) {
      files.add_epoch({.epoch = step / kStepsPerEpoch - 1,
                       .steps_done = step,
                       .num_steps = kStepsPerEpoch,
                       .test_accuracy = x / 1000},
                      JobNumbers({{.samples = 10, .seconds = 2}}));
    }
  }
  return 0;
}
