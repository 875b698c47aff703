// SPDX-License-Identifier: Apache-2.0
// Log lines and the progress bar as a terminal receives them.
#include "train/metrics/console/metrics_console.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "ddp/core/logging.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"

namespace {

using ddp::ProgressStyle;
using ddp::detail::MetricsConsole;
using testing::num_found;
using testing::stderr_of;

ddp::MetricsOptions shown_as(ProgressStyle progress) {
  ddp::MetricsOptions options;
  options.progress = progress;
  return options;
}

const std::string kClear = "\r\033[K";

// What `function` writes to a terminal that is standard error.
template <typename F>
std::string written_to_terminal(F&& function) {
  const int reader = posix_openpt(O_RDWR | O_NOCTTY);
  REQUIRE((reader >= 0 && grantpt(reader) == 0 && unlockpt(reader) == 0));
  const int terminal = open(ptsname(reader), O_RDWR | O_NOCTTY);
  REQUIRE(terminal >= 0);
  const int before = dup(STDERR_FILENO);
  dup2(terminal, STDERR_FILENO);
  function();
  dup2(before, STDERR_FILENO);
  char text[1024];
  const auto size = read(reader, text, sizeof(text));
  for (const int file : {before, terminal, reader}) {
    close(file);
  }
  return {text, static_cast<size_t>(std::max<ssize_t>(size, 0))};
}

}  // namespace

TEST_CASE("a bar shows the last line's numbers, and stays below all log lines") {
  const auto text = stderr_of([] {
    MetricsConsole console(shown_as(ProgressStyle::Bar), /*is_main=*/true);
    console.set_max_steps(10);
    console.log_step({.step = 4, .loss = 0.5, .step_ms = 1000});
    console.draw_bar(4, /*force=*/true);
    ddp::log_info("another thread's line");
    console.set_max_steps(20);
    console.draw_bar(5, true);
  });
  CHECK(num_found(text, "step 4/10 | loss 0.5") == 1);
  const std::string bar =
      "[=========>              ]  40 % | step 4/10 | ETA 00:00:06 | loss 0.5000";
  CHECK_THAT(text, Catch::Contains("\r" + bar + kClear.substr(1) + kClear + "["));
  CHECK_THAT(text, Catch::Contains("another thread's line\n" + bar + "\r"));
  CHECK_THAT(text, Catch::Contains("step 5/20 | ETA 00:00:15"));
  CHECK(text.substr(text.size() - 4) == kClear);
}

TEST_CASE("a bar is drawn at most every 100 ms unless forced") {
  const auto text = stderr_of([] {
    MetricsConsole console(shown_as(ProgressStyle::Bar), true);
    console.set_max_steps(10);
    for (int64_t done = 1; done < 10; ++done) {
      console.draw_bar(done, false);
    }
    console.draw_bar(10, true);
  });
  REQUIRE(num_found(text, "step 1/10") == 1);
  REQUIRE(num_found(text, "step 2/10") == 0);
  REQUIRE(num_found(text, "step 10/10") == 1);
}

TEST_CASE("progress=off shows nothing, plain shows lines, other ranks show no bar") {
  const auto output = [](ProgressStyle progress, bool is_main) {
    return stderr_of([&] {
      MetricsConsole console(shown_as(progress), is_main);
      console.set_max_steps(10);
      if (is_main) {
        console.log_step({.step = 4, .loss = 0.5});
      }
      console.draw_bar(4, true);
    });
  };
  REQUIRE(output(ProgressStyle::Off, true).empty());
  REQUIRE(output(ProgressStyle::Bar, false).empty());
  const auto plain = output(ProgressStyle::Plain, true);
  REQUIRE(num_found(plain, "step 4/10") == 1);
  REQUIRE(num_found(plain, "\r") == 0);
}

TEST_CASE("a log line in a file has all numbers, one on a terminal fits it") {
  const auto write_line = [] {
    MetricsConsole console(shown_as(ProgressStyle::Plain), /*is_main=*/true);
    console.log_step({.step = 150,
                      .epoch = 1.6125,
                      .loss = 2.0123,
                      .accuracy = 0.2438,
                      .lr = 6.62e-5,
                      .grad_norm = 2.18,
                      .step_ms = 141.42,
                      .samples_per_second = 226.24,
                      .exposed_comm_ms = 1.5,
                      .peak_memory_gib = 0.593});
  };
  CHECK_THAT(stderr_of(write_line),
             Catch::Contains("step 150 | epoch 1.61 | loss 2.0123 | accuracy 24.38 % | lr 6.62e-05 "
                             "| grad_norm 2.18 | 141.4 ms/step | 226.2 samples/s | exposed comm "
                             "1.50 ms | peak 0.59 GiB\n"));
  const auto line = written_to_terminal(write_line);
  CHECK_THAT(line, Catch::Contains("step 150 | loss 2.0123 | accuracy 24.38 % | 226.2 samples/s"));
  CHECK_THAT(line, !Catch::Contains("GiB"));
  CHECK(line.size() <= 120 + std::string("\r\n").size());
}
