// SPDX-License-Identifier: Apache-2.0
// A run's checkpoint folder: owners, failed saves, settings of a resumed run.
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/launch/training_state.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/metrics.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/child_process.hpp"

namespace ddp {
namespace {

using testing::end_of;
using testing::Ended;
using testing::run_program;
using testing::start_program;

// Saves after every step of 10 ms until `file` exists.
RunFunction saves_until(const std::string& file) {
  return [file](Context& context, const Config& config) {
    auto model = testing::small_model();
    Metrics metrics(context, config.metrics);
    Checkpointer checkpointer(context, config.checkpoint, {model});
    const auto first = checkpointer.restore();
    std::printf("loop from %d\n", static_cast<int>(first));
    for (int64_t step = first; step < 3000 && !std::filesystem::exists(file); ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      metrics.end_step(step, {.num_samples = 1});
      checkpointer.save_if_due(step);
    }
  };
}

bool wait_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return condition();
}

// Saves into the folder fail from here on.
void replace_by_file(const std::string& folder) {
  std::filesystem::remove_all(folder);
  testing::write_file(folder, "a file where the folder was");
}

// Prints the failure that the close throws, and returns 9 for it.
int close_and_report(Context& context) {
  try {
    context.close();
  } catch (const WriteError& error) {
    std::printf("thrown: %s\n", error.what());
    return 9;
  }
  return 0;
}

}  // namespace

TEST_CASE("a run whose last save failed ends with 73, with and without wait()") {
  testing::TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const bool waits = GENERATE(false, true), retries = GENERATE(false, true);
  const Ended ended = run_program(
      [&](Context& context, const Config& config) {
        auto model = testing::small_model();
        Checkpointer checkpointer(context, config.checkpoint, {model});
        checkpointer.restore();
        replace_by_file(dir);
        checkpointer.save(0);
        checkpointer.save_if_due(0);  // the same step: no progress yet
        if (retries) {
          std::filesystem::remove(dir);
          checkpointer.save(1);
        }
        if (waits) {
          checkpointer.wait();
          std::puts("summary");
        }
      },
      {"checkpoint.dir=" + dir});
  INFO(ended.output);
  CHECK(ended.code() == (retries ? 0 : 73));
  CHECK(ended.says("summary") == (waits && retries));
  CHECK(ended.says("training continues") == retries);
  CHECK(ended.says("the checkpoint after 1 steps was not saved"));
  CHECK(ended.says(dir + ": Not a directory; fix: remove the file where a folder is needed, or set "
                         "another checkpoint.dir"));
  CHECK(ended.says("first cause: the checkpoint after 1 steps was not saved") == !retries);
}

TEST_CASE("the close of a context throws if a checkpointer's last save failed") {
  testing::TemporaryFolder folder;
  CheckpointOptions options;
  options.dir = folder.file("ckpt");
  const Ended ended = end_of(testing::start_child([&] {
    ContextOptions on_cpu;
    on_cpu.device = DeviceChoice::Cpu;
    auto context = Context::create(on_cpu);
    {
      auto model = testing::small_model();
      Checkpointer checkpointer(context, options, {model});
      checkpointer.restore();
      replace_by_file(options.dir);
      checkpointer.save(0);
    }
    return close_and_report(context);
  }));
  INFO(ended.output);
  CHECK(ended.code() == 9);
  CHECK(ended.says("thrown: rank 0 failed before the first step: the checkpoint after 1 steps"));
}

TEST_CASE("a checkpointer and metrics report to a context that moved after their construction") {
  testing::TemporaryFolder folder;
  CheckpointOptions options;
  options.dir = folder.file("ckpt");
  const Ended ended = end_of(testing::start_child([&] {
    ContextOptions on_cpu;
    on_cpu.device = DeviceChoice::Cpu;
    detail::set_step_hook(
        [](int64_t step) { std::printf("announced %d\n", static_cast<int>(step)); });
    MetricsOptions no_files;
    no_files.dir = "";
    auto model = testing::small_model();
    std::optional<Context> made(Context::create(on_cpu));
    std::optional<Checkpointer> checkpointer;
    checkpointer.emplace(*made, options, std::vector<StatefulRef>{model});
    std::optional<Metrics> metrics;
    metrics.emplace(*made, no_files);
    Context context = *std::move(made);
    made.reset();
    checkpointer->restore();
    metrics->begin(3);
    replace_by_file(options.dir);
    checkpointer->save(0);
    checkpointer.reset();
    metrics.reset();
    return close_and_report(context);
  }));
  INFO(ended.output);
  CHECK(ended.code() == 9);
  CHECK(ended.says("announced 0"));
  CHECK(ended.says("announced 3"));
  CHECK(ended.says("thrown: "));
}

TEST_CASE(
    "a second job on a checkpoint.dir or a run folder in use is refused, and the first continues") {
  testing::TemporaryFolder folder;
  const auto stop = folder.file("stop");
  const auto dir = folder.file("ckpt");
  const std::vector<std::string> settings{
      "checkpoint.dir=" + dir, "checkpoint.every_steps=1",     "checkpoint.keep_last=1",
      "metrics.log_every=1",   "metrics.dir=" + folder.path(), "metrics.run_name=a"};
  const auto with = [&](const std::string& setting) {
    auto changed = settings;
    changed.push_back(setting);
    return changed;
  };
  const auto first = start_program(saves_until(stop), settings);
  REQUIRE(wait_for([&] { return !testing::names_in(dir).empty(); }));
  const auto owner = "process " + std::to_string(first.pid);

  const Ended second = run_program(saves_until(stop), with("metrics.run_name=b"));
  INFO(second.output);
  CHECK(second.code() == 64);
  CHECK(second.says("checkpoint.dir=" + dir + " is in use by host "));
  CHECK(second.says(owner));
  CHECK(second.says("fix: end that job first, or set another checkpoint.dir"));
  CHECK_FALSE(second.says("loop from"));

  const Ended third = run_program(saves_until(stop), with("checkpoint.dir="));
  INFO(third.output);
  CHECK(third.code() == 64);
  CHECK(third.says("the run folder " + folder.file("a")));
  CHECK(third.says(owner));
  CHECK(third.says("set another metrics.run_name"));

  testing::write_file(stop, "");
  const Ended ended = end_of(first);
  INFO(ended.output);
  CHECK(ended.code() == 0);
  CHECK_FALSE(ended.says("not saved"));
  const auto left = testing::names_in(dir);
  REQUIRE(left.size() == 1);
  // The next start finds no owner and does not wait.
  const auto begin = std::chrono::steady_clock::now();
  const Ended next = run_program(saves_until(stop), settings);
  CHECK(next.says("resumed from " + dir + "/" + left.front()));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));  // a wait is 10 s
}

TEST_CASE("a start waits for a job that was asked to stop, and continues after it") {
  testing::TemporaryFolder folder;
  const auto told = folder.file("told"), heard = folder.file("heard");
  const auto dir = folder.file("ckpt");
  const std::vector<std::string> settings{"checkpoint.dir=" + dir, "checkpoint.every_steps=1",
                                          "metrics.dir="};
  // The first run ends after the other one is seen waiting.
  const auto first = start_program(
      [&](Context& context, const Config& config) {
        auto model = testing::small_model();
        Checkpointer checkpointer(context, config.checkpoint, {model});
        checkpointer.set_before_stop([&](int64_t) {
          testing::write_file(told, "");
          wait_for([&] { return std::filesystem::exists(heard); });
        });
        for (int64_t step = checkpointer.restore(); step < 3000; ++step) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
          checkpointer.save_if_due(step);
        }
      },
      settings);
  REQUIRE(wait_for([&] { return !testing::names_in(dir).empty(); }));
  kill(first.pid, SIGTERM);
  REQUIRE(wait_for([&] { return std::filesystem::exists(told); }));
  // The record shows this from the next beat on.
  REQUIRE(wait_for([&] {
    return testing::read_file(dir + "/.owner").find("\"ending\":true") != std::string::npos;
  }));
  const auto second = start_program(saves_until(told), settings);
  const auto waiting = testing::output_until(second, "waiting at most 120 s for the end of host");
  testing::write_file(heard, "");
  const Ended one = end_of(first);
  Ended two = end_of(second);
  two.output = waiting + two.output;
  INFO(one.output << two.output);
  CHECK(one.code() == 75);
  CHECK(two.code() == 0);
  CHECK(two.says("waiting at most 120 s for the end of host"));
  CHECK(two.says("resumed from " + dir));
}

// Both starts belong to one job, as after a requeue: the second one waits for the first.
TEST_CASE("a start that waits for a folder ends with 75 on SIGTERM") {
  testing::TemporaryFolder folder;
  const auto end = folder.file("end");
  const auto dir = folder.file("ckpt");
  const bool waits_for_metrics = GENERATE(false, true);
  const auto settings = [&](const std::string& checkpoints, const std::string& run_name) {
    return std::vector<std::string>{"checkpoint.dir=" + checkpoints, "checkpoint.every_steps=1",
                                    "metrics.dir=" + folder.path(), "metrics.run_name=" + run_name};
  };
  setenv("SLURM_JOB_ID", "4711", 1);
  const auto first = start_program(saves_until(end), settings(dir, "a"));
  REQUIRE(wait_for([&] { return !testing::names_in(dir).empty(); }));
  const auto second =
      start_program(saves_until(end),
                    waits_for_metrics ? settings(folder.file("other"), "a") : settings(dir, "b"));
  unsetenv("SLURM_JOB_ID");
  const auto waiting = testing::output_until(second, "waiting at most 120 s for the end of host");
  const auto begin = std::chrono::steady_clock::now();
  kill(second.pid, SIGTERM);
  Ended ended = end_of(second);
  ended.output = waiting + ended.output;
  INFO(ended.output);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));
  CHECK(ended.code() == 75);
  CHECK(ended.says(
      "a stop was requested while this process waited for " +
      (waits_for_metrics ? "the run folder " + folder.file("a") : "checkpoint.dir=" + dir)));
  CHECK(ended.says("process " + std::to_string(first.pid)));
  CHECK_FALSE(ended.says("loop from"));
  testing::write_file(end, "");
  CHECK(end_of(first).code() == 0);
}

TEST_CASE("a run continues and saves when nobody reads its output") {
  testing::TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const auto program = start_program(
      [&](Context& context, const Config& config) {
        auto model = testing::small_model();
        Checkpointer checkpointer(context, config.checkpoint, {model});
        for (int64_t step = checkpointer.restore(); step < 50; ++step) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
          std::printf("step %d\n", static_cast<int>(step));
          std::fflush(stdout);
          log_info("to standard error");
          checkpointer.save_if_due(step);
        }
      },
      {"checkpoint.dir=" + dir, "checkpoint.every_steps=10"});
  char first = 0;
  REQUIRE(read(program.output, &first, 1) == 1);
  close(program.output);  // like `| head -c 1`
  int status = 0;
  waitpid(program.pid, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  const auto saved = testing::names_in(dir);
  REQUIRE_FALSE(saved.empty());
  CHECK(saved.front() == "step_0000000050");
}

TEST_CASE("a resumed run logs its changed settings, a requeued one that it starts at step 0") {
  testing::TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const auto start = [&](const std::vector<std::string>& more, const char* restarts = "0") {
    std::vector<std::string> settings{"metrics.dir=", "checkpoint.every_steps=1",
                                      "checkpoint.dir=" + dir, "lr_schedule.lr=0.5",
                                      "train.max_grad_norm=1"};
    settings.insert(settings.end(), more.begin(), more.end());
    setenv("SLURM_JOB_ID", "4711", 1);
    setenv("SLURM_RESTART_COUNT", restarts, 1);
    const Ended ended = run_program(
        [&](Context& context, const Config& config) {
          auto model = testing::small_model();
          Checkpointer checkpointer(context, config.checkpoint, {model});
          const auto step = checkpointer.restore();
          checkpointer.save(step);
        },
        settings, {uses({"lr_schedule", "metrics", "optimizer", "train.max_grad_norm"})});
    unsetenv("SLURM_JOB_ID");
    unsetenv("SLURM_RESTART_COUNT");
    CHECK(ended.code() == 0);
    return ended;
  };
  CHECK_FALSE(start({}).says("warning"));
  CHECK_FALSE(start({"metrics.log_every=7"}, "1").says("warning"));
  const Ended changed =
      start({"lr_schedule.lr=0.1", "optimizer.momentum=0.8", "train.max_grad_norm=0"});
  INFO(changed.output);
  CHECK(changed.says("[warning] a setting differs from the checkpoint " + dir +
                     "/step_0000000002: lr_schedule.lr=0.1 (saved with 0.5)"));
  CHECK(changed.says("optimizer.momentum=0.8 (saved with 0)"));
  CHECK(changed.says("train.max_grad_norm=0 (saved with 1)"));
  std::filesystem::remove_all(dir);
  CHECK(start({}, "2").says("[warning] restart 2 of job 4711 begins at step 0: checkpoint.dir=" +
                            dir + " holds no checkpoint; fix: "));
  CHECK(start({"checkpoint.dir="}, "2").says("begins at step 0: checkpoint.dir is empty"));
}

namespace {

struct Upgrade {
  int64_t heads = 8;
};
void describe_fields(Upgrade& options, FieldVisitor& visitor) {
  visitor.field({.name = "heads", .doc = "of a later version"}, options.heads);
}

}  // namespace

TEST_CASE("a setting that only one of two versions has is logged if it is not the default") {
  testing::TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const auto start = [&](std::vector<std::string> settings, const std::vector<Section>& sections) {
    for (const auto& setting :
         {std::string("metrics.dir="), std::string("train.max_steps=9"), "checkpoint.dir=" + dir}) {
      settings.push_back(setting);
    }
    const Ended ended = run_program(
        [&](Context& context, const Config& config) {
          auto model = testing::small_model();
          Checkpointer checkpointer(context, config.checkpoint, {model});
          const auto step = checkpointer.restore();
          if (step < config.train.max_steps) {
            checkpointer.save(step);
          }
        },
        settings, sections);
    UNSCOPED_INFO(ended.output);
    CHECK(ended.code() == 0);
    return ended;
  };
  // This version announces all of section train, and its own section.
  const std::vector<Section> more{uses({"train"}), declare_section<Upgrade>("upgrade")};
  CHECK_FALSE(start({}, {}).says("a setting differs"));
  CHECK_FALSE(start({}, more).says("a setting differs"));
  // The program has no default for comparison.
  const Ended unknown = start({}, {});
  CHECK(unknown.says("upgrade.heads is not set (saved with 8)"));
  CHECK_FALSE(unknown.says("saved with: train."));
  const Ended added = start({"upgrade.heads=4", "train.mixup=0.5"}, more);
  CHECK(added.says("upgrade.heads=4 (saved without this setting)"));
  CHECK(added.says("train.mixup=0.5 (saved without this setting)"));
  CHECK_FALSE(added.says("train.label_smoothing"));
  const Ended removed = start({}, {});
  CHECK(removed.says("upgrade.heads is not set (saved with 4)"));
  CHECK(removed.says("train.mixup is not set (saved with 0.5)"));
  CHECK_FALSE(removed.says("train.label_smoothing"));
}

}  // namespace ddp
