// SPDX-License-Identifier: Apache-2.0
// The progress bar and the log lines of one run.
#include <chrono>
#include <string>
#include <thread>

#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/train/metrics/metrics_on.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

using testing::metrics_in;
using testing::rethrow;
using testing::run_ranks;
using testing::TemporaryFolder;

TEST_CASE("the bar shows the time left of the log line above it") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.progress = ddp::ProgressStyle::Bar;
  const auto text = testing::stderr_of([&] {
    rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
      auto metrics = testing::metrics_on(plane, options);
      metrics.begin(0, /*num_steps=*/1000);
      for (int step = 0; step < 4; ++step) {  // a line after each second step
        std::this_thread::sleep_for(std::chrono::milliseconds(step < 2 ? 2 : 30));
        metrics.end_step(step, {.num_samples = 1});
      }
    }));
  });
  const auto time_left = [&](std::size_t from) {
    REQUIRE(from != std::string::npos);
    return text.substr(text.find("ETA ", from), std::string("ETA 00:00:00").size());
  };
  REQUIRE(testing::num_found(text, "ms/step") == 2);
  CHECK(time_left(text.rfind("% | step 4/1000")) == time_left(text.rfind("ms/step")));
  CHECK(time_left(text.rfind("ms/step")) != time_left(text.find("ms/step")));
}
