// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "train/background_task.hpp"
#include "train/metrics/files/run_folder.hpp"
#include "train/metrics/metrics_format.hpp"
#include "train/metrics/ranks/device_sensors.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace ddp::detail;
using testing::TemporaryFolder;

TEST_CASE("csv and jsonl hold the same numbers and omit unknown ones") {
  const Row row = {{.name = "step", .integer = 3},
                   {.name = "loss", .number = 0.1},
                   {.name = "accuracy"},
                   {.name = "note", .text = "a \"quoted\", one"},
                   {.name = "norm", .number = INFINITY}};
  REQUIRE(csv_header(row) == "step,loss,accuracy,note,norm");
  REQUIRE(csv_line(row) == "3,0.1,,\"a \"\"quoted\"\", one\",inf");
  REQUIRE(json_line(row) == R"({"step":3,"loss":0.1,"note":"a \"quoted\", one","norm":"inf"})");
}

TEST_CASE("a NaN is shown and does not count as unknown") {
  const double nan = GENERATE(NAN, -NAN);
  const Row row = {{.name = "loss", .number = nan}, {.name = "low", .number = -INFINITY}};
  REQUIRE(csv_line(row) == "nan,-inf");
  REQUIRE(json_line(row) == R"({"loss":"nan","low":"-inf"})");
  REQUIRE(log_line({.step = 7, .loss = nan, .grad_norm = nan}, 0, NAN) ==
          "step 7 | loss nan | grad_norm nan");
  REQUIRE(progress_bar(7, 0, NAN, nan, 80) == "step 7 | loss nan");
  REQUIRE(if_measured(nan) == std::nullopt);
}

TEST_CASE("the log line shows the known numbers") {
  LoggedNumbers numbers{.step = 120, .loss = 1.25, .step_ms = 10.04, .samples_per_second = 2000};
  numbers.samples_per_second_per_rank = 500;
  REQUIRE(log_line(numbers, 0, NAN) == "step 120 | loss 1.2500 | 10.0 ms/step | 2000 samples/s");
  numbers.accuracy = 0.5;
  REQUIRE_THAT(log_line(numbers, 1000, 3725),
               Catch::StartsWith("step 120/1000 | loss 1.2500 | accuracy 50.00 % |") &&
                   Catch::EndsWith(" | ETA 01:02:05"));
  REQUIRE_THAT(log_line(numbers, 120, 0), !Catch::Contains("ETA"));
  REQUIRE(step_row(numbers, 1).size() == 17);
  REQUIRE(step_row(numbers, 1)[7].name == "samples_per_second");
  numbers.sample_unit = "tokens";
  REQUIRE_THAT(log_line(numbers, 0, NAN), Catch::Contains("| 2000 tokens/s"));
  REQUIRE(step_row(numbers, 1)[7].name == "tokens_per_second");
  REQUIRE(step_row(numbers, 1)[8].name == "tokens_per_second_per_rank");
  REQUIRE(evaluation_line({.done = 5, .loss = 1.5, .accuracy = 0.25}, 20) ==
          "step 5/20 | eval loss 1.5000 | eval accuracy 25.00 %");
}

TEST_CASE("a log line fits 120 columns with its time, and leaves out what did not change") {
  LoggedNumbers numbers{.step = 150,
                        .epoch = 1.6125,
                        .loss = 2.0123,
                        .accuracy = 0.2438,
                        .lr = 6.62e-5,
                        .grad_norm = 2.18,
                        .step_ms = 141.42,
                        .samples_per_second = 226.24,
                        .exposed_comm_ms = 1.4,
                        .loader_wait_ms = 0,
                        .peak_memory_gib = 0.593};
  numbers.sample_unit = "images";
  // Least important: memory, the time of a step, the learning rate, the epoch.
  CHECK(log_line(numbers, 186, 5) ==
        "step 150/186 | loss 2.0123 | accuracy 24.38 % | 226.2 images/s | ETA 00:00:05");
  CHECK(log_line(numbers, 0, NAN) ==
        "step 150 | epoch 1.61 | loss 2.0123 | accuracy 24.38 % | grad_norm 2.18 | 226.2 images/s");
  numbers.grad_norm = std::nullopt;
  CHECK(log_line(numbers, 0, NAN, numbers) ==
        "step 150 | epoch 1.61 | loss 2.0123 | accuracy 24.38 % | 141.4 ms/step | 226.2 images/s");
  numbers.exposed_comm_ms = 1.5;
  numbers.loss = std::nullopt;
  CHECK_THAT(log_line(numbers, 186, 5, numbers), Catch::Contains("exposed comm 1.50 ms"));
  numbers.custom = {{.name = "d_loss", .value = 0.25},
                    {.name = "pairs", .is_rate = true, .value = 7}};
  CHECK_THAT(log_line(numbers, 186, 5, numbers), Catch::Contains(" | d_loss 0.25 | 7.0 pairs/s"));
  CHECK(log_line(numbers, 186, 5, numbers).size() <= 90);
  CHECK(evaluation_line({.done = 5, .custom = numbers.custom}, 0) ==
        "step 5 | d_loss 0.25 | 7.0 pairs/s");
}

TEST_CASE("the progress bar fits its terminal") {
  REQUIRE(progress_bar(500, 1000, 61, 0.5, 200) ==
          "[============>           ]  50 % | step 500/1000 | ETA 00:01:01 | loss 0.5000");
  REQUIRE(progress_bar(500, 1000, 61, 0.5, 20).size() == 19);
  REQUIRE_THAT(progress_bar(1000, 1000, 0, {}, 200),
               Catch::StartsWith("[========================] 100 %"));
  REQUIRE(progress_bar(7, 0, NAN, {}, 80) == "step 7");
  REQUIRE(format_duration(2 * 86400 + 3 * 3600) == "2d 03:00:00");
  REQUIRE(format_duration(NAN) == "?");
  REQUIRE(format_duration(-1) == "?");
}

TEST_CASE("the commit is read from Git's files") {
  TemporaryFolder folder;
  const std::string commit(40, 'a'), packed(40, 'b');
  std::filesystem::create_directories(folder.file("work/.git/refs/heads"));
  std::filesystem::create_directories(folder.file("work/deep/er"));
  testing::write_file(folder.file("work/.git/HEAD"), "ref: refs/heads/main\n");
  testing::write_file(folder.file("work/.git/refs/heads/main"), commit + "\n");
  testing::write_file(folder.file("work/.git/packed-refs"), "# x\n" + packed + " refs/heads/old\n");
  REQUIRE(read_git_commit(folder.file("work/deep/er")) == commit);
  testing::write_file(folder.file("work/.git/HEAD"), "ref: refs/heads/old\n");
  REQUIRE(read_git_commit(folder.file("work")) == packed);
  testing::write_file(folder.file("work/.git/HEAD"), packed + "\n");
  REQUIRE(read_git_commit(folder.file("work")) == packed);
  testing::write_file(folder.file("work/.git/HEAD"), "ref: refs/heads/none\n");
  REQUIRE(read_git_commit(folder.file("work")) == "");
  // A linked working tree.
  std::filesystem::create_directories(folder.file("work/.git/worktrees/x"));
  std::filesystem::create_directories(folder.file("linked"));
  testing::write_file(folder.file("linked/.git"),
                      "gitdir: " + folder.file("work/.git/worktrees/x") + "\n");
  testing::write_file(folder.file("work/.git/worktrees/x/HEAD"), "ref: refs/heads/main\n");
  testing::write_file(folder.file("work/.git/worktrees/x/commondir"), "../..\n");
  REQUIRE(read_git_commit(folder.file("linked")) == commit);
}

TEST_CASE("the next start of a job appends to its run folder") {
  TemporaryFolder folder;
  for (int start = 0; start < 2; ++start) {
    RunFolder run(folder.path(), "42");
    run.append("steps.csv", std::to_string(start), "header");
    run.write("settings.txt", "start " + std::to_string(start));
  }
  REQUIRE(testing::read_file(folder.file("42/steps.csv")) == "header\n0\n1\n");
  REQUIRE(testing::read_file(folder.file("42/settings.txt")) == "start 1");
  REQUIRE_THROWS_AS(RunFolder(folder.path(), "../x"), ddp::SettingsError);
  testing::write_file(folder.file("file"), "");
  REQUIRE_THROWS_AS(RunFolder(folder.file("file"), "x"), ddp::WriteError);
  RunFolder().append("steps.csv", "dropped");
  RunFolder lost(folder.path(), "43");
  std::filesystem::remove_all(lost.path());
  REQUIRE_NOTHROW(lost.append("steps.csv", "x"));
}

TEST_CASE("background tasks run one after another and report their errors") {
  int count = 0;
  {
    BackgroundTask task;
    REQUIRE(!task.running());
    for (int i = 0; i < 100; ++i) {
      task.start([&count] { ++count; });
      task.wait();
      REQUIRE(task.error() == "");
    }
    task.start([] { throw std::runtime_error("disk"); });
    task.wait();
    REQUIRE(task.error() == "disk");
    task.start([&count] { ++count; });
  }  // lets the last sampler end
  REQUIRE(count == 101);
}

TEST_CASE("without a driver there is no GPU monitor, and no error") {
  REQUIRE(GpuMonitor::open("ffff:ff:1f.7") == nullptr);
}

TEST_CASE("a GPU that answers slowly blocks no caller, and its answers arrive") {
  using namespace std::chrono_literals;
  std::atomic<int> answers{0};
  std::atomic<bool> slow{false};
  {
    const GpuSampler sampler(
        [&]() -> GpuNumbers {
          while (slow) {
            std::this_thread::sleep_for(1ms);
          }
          return {.energy_joules = static_cast<double>(++answers), .utilisation_percent = 50};
        },
        /*period=*/1ms);
    REQUIRE(sampler.latest().energy_joules >= 1);  // waits for the first sample
    REQUIRE(sampler.latest().utilisation_percent == 50);
    for (int i = 0; i < 10'000 && sampler.latest().energy_joules < 3; ++i) {
      std::this_thread::sleep_for(1ms);
    }
    REQUIRE(sampler.latest().energy_joules >= 3);
    slow = true;
    std::this_thread::sleep_for(20ms);
    const double before = sampler.latest().energy_joules;  // would wait forever
    REQUIRE(sampler.latest().energy_joules == before);
    slow = false;
  }
  const int at_end = answers;
  std::this_thread::sleep_for(20ms);
  REQUIRE(answers == at_end);
}
