// SPDX-License-Identifier: Apache-2.0
// ddp::run in processes of its own, for it decides how a process ends.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ddp/amp/autocast.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/metrics.hpp"
#include "ddp/train/run.hpp"
#include "support/catch.hpp"
#include "unit/train/checkpoint_objects.hpp"

namespace ddp {
namespace {

struct Ended {
  int status = 0;
  std::string output;  // standard output and error
  int code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }
  bool says(const std::string& text) const { return output.find(text) != std::string::npos; }
};

struct Running {
  pid_t pid = 0;
  int output = -1;
};

Running start_child(const std::function<int()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    for (const int number : {SIGTERM, SIGUSR1, SIGINT}) {
      signal(number, SIG_DFL);  // Catch2 has its own handlers
    }
    const int code = body();
    std::fflush(nullptr);
    _exit(code);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

Ended end_of(const Running& running) {
  Ended ended;
  char buffer[4096];
  for (ssize_t size = 0; (size = read(running.output, buffer, sizeof(buffer))) > 0;) {
    ended.output.append(buffer, static_cast<std::size_t>(size));
  }
  close(running.output);
  waitpid(running.pid, &ended.status, 0);
  return ended;
}

Running start_program(const RunFunction& function, std::vector<std::string> arguments = {},
                      const std::vector<Section>& sections = {}) {
  std::vector<const char*> words{"program", "context.device=cpu"};
  for (const auto& argument : arguments) {
    words.push_back(argument.c_str());
  }
  return start_child(
      [&] { return run(static_cast<int>(words.size()), words.data(), function, sections); });
}

Ended run_program(const RunFunction& function, const std::vector<std::string>& arguments = {},
                  const std::vector<Section>& sections = {}) {
  return end_of(start_program(function, arguments, sections));
}

// Steps of 10 ms, each saved, until `file` is there.
RunFunction saves_until(const std::string& file) {
  return [file](Context& context, const Config& config) {
    testing::Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
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

struct Mine {
  int64_t depth = 3;
};
void describe_fields(Mine& options, FieldVisitor& visitor) {
  visitor.field({.name = "depth", .doc = "of the tree", .min = 1}, options.depth);
}

}  // namespace

TEST_CASE("a run that ends well returns 0") {
  const Ended ended = run_program(
      [](Context& context, const Config& config) {
        std::printf("rank %d of %d, batch %d\n", context.rank(), context.world_size(),
                    static_cast<int>(config.train.batch_size));
      },
      {"train.batch_size=8"}, {uses({"train.batch_size"})});
  CHECK(ended.code() == 0);
  CHECK(ended.says("rank 0 of 1, batch 8"));
}

TEST_CASE("each error has its exit code, and its message is shown with the rank") {
  const auto check = [](int code, const std::string& words, const RunFunction& function) {
    const Ended ended = run_program(function);
    INFO(ended.output);
    CHECK(ended.code() == code);
    CHECK(ended.says(words));
  };
  check(64, "bad setting", [](Context&, const Config&) { throw SettingsError("bad setting"); });
  check(65, "shard 7", [](Context&, const Config&) { throw DataError("shard 7"); });
  check(70, "other model", [](Context&, const Config&) { throw MismatchError("other model"); });
  check(73, "disk full", [](Context&, const Config&) { throw WriteError("disk full"); });
  check(74, "no checkpoint", [](Context&, const Config&) { throw ReadError("no checkpoint"); });
  check(75, "saved", [](Context&, const Config&) { throw Stop("saved"); });
  check(76, "rank 3 is gone",
        [](Context&, const Config&) { throw PeerLostError("rank 3 is gone"); });
  check(1, "my bug", [](Context&, const Config&) { throw std::runtime_error("my bug"); });
  check(1, "unknown type", [](Context&, const Config&) { throw 7; });
  check(1, "libddp bug", [](Context&, const Config&) { DDP_CHECK(false, "why"); });
  check(1, "rank 0", [](Context&, const Config&) { throw std::runtime_error("my bug"); });
}

TEST_CASE("a run whose last save failed ends with 73, whether it waits for it or not") {
  testing::TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const bool waits = GENERATE(false, true), retries = GENERATE(false, true);
  const Ended ended = run_program(
      [&](Context& context, const Config& config) {
        testing::Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
        Checkpointer checkpointer(context, config.checkpoint, {model});
        checkpointer.restore();
        std::filesystem::remove_all(dir);
        testing::write_file(dir, "a file where the folder was");
        checkpointer.save(0);
        checkpointer.save_if_due(0);  // of the same step: nothing goes on yet
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
  CHECK(ended.says("training goes on") == retries);
  CHECK(ended.says("the checkpoint after 1 steps was not saved"));
  CHECK(ended.says(dir + ": Not a directory; fix: remove the file that stands where a folder is "
                         "needed, or name another checkpoint.dir"));
  CHECK(ended.says("first cause: rank 0") == !retries);
}

TEST_CASE("a second job on a checkpoint.dir or a run folder in use is refused, the first goes on") {
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
  CHECK(second.says("fix: end that job first, or name another checkpoint.dir"));
  CHECK_FALSE(second.says("loop from"));

  const Ended third = run_program(saves_until(stop), with("checkpoint.dir="));
  INFO(third.output);
  CHECK(third.code() == 64);
  CHECK(third.says("the run folder " + folder.file("a")));
  CHECK(third.says(owner));
  CHECK(third.says("name another metrics.run_name"));

  testing::write_file(stop, "");
  const Ended ended = end_of(first);
  INFO(ended.output);
  CHECK(ended.code() == 0);
  CHECK_FALSE(ended.says("not saved"));
  const auto left = testing::names_in(dir);
  REQUIRE(left.size() == 1);
  // The next start finds no owner, and so waits for none.
  const auto begin = std::chrono::steady_clock::now();
  const Ended next = run_program(saves_until(stop), settings);
  CHECK(next.says("resumed from " + dir + "/" + left.front()));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(2));
}

TEST_CASE("a start waits for a job that was asked to stop, and goes on behind it") {
  testing::TemporaryFolder folder;
  const auto never = folder.file("never"), told = folder.file("told");
  const auto dir = folder.file("ckpt");
  const std::vector<std::string> settings{"checkpoint.dir=" + dir, "checkpoint.every_steps=1",
                                          "metrics.dir="};
  // It takes its time between the signal and its end.
  const auto first = start_program(
      [&](Context& context, const Config& config) {
        testing::Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
        Checkpointer checkpointer(context, config.checkpoint, {model});
        checkpointer.set_before_stop([&](int64_t) {
          testing::write_file(told, "");
          std::this_thread::sleep_for(std::chrono::seconds(5));
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
  // The record says so from the next beat on.
  REQUIRE(wait_for([&] {
    return testing::read_file(dir + "/.owner").find("\"ending\":true") != std::string::npos;
  }));
  const auto second = start_program(saves_until(told), settings);
  const Ended one = end_of(first), two = end_of(second);
  INFO(one.output << two.output);
  CHECK(one.code() == 75);
  CHECK(two.code() == 0);
  CHECK(two.says("waiting at most 120 s for the end of host"));
  CHECK(two.says("resumed from " + dir));
}

TEST_CASE("a run goes on and saves when nobody reads its output any more") {
  testing::TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const auto program = start_program(
      [&](Context& context, const Config& config) {
        testing::Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
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
  close(program.output);  // as `| head -c 1`
  int status = 0;
  waitpid(program.pid, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  const auto saved = testing::names_in(dir);
  REQUIRE_FALSE(saved.empty());
  CHECK(saved.front() == "step_0000000050");
}

TEST_CASE(
    "a resumed run tells which settings it has otherwise, a requeued one that it begins anew") {
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
          testing::Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
          Checkpointer checkpointer(context, config.checkpoint, {model});
          const auto step = checkpointer.restore();
          checkpointer.save(step);
        },
        settings);
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
  CHECK(changed.says("[warning] another setting than " + dir +
                     "/step_0000000002 was saved with: "
                     "lr_schedule.lr=0.1, it had 0.5"));
  CHECK(changed.says("optimizer.momentum=0.8, it had 0"));
  CHECK(changed.says("train.max_grad_norm=0, it had 1"));
  std::filesystem::remove_all(dir);
  CHECK(start({}, "2").says("[warning] restart 2 of job 4711 begins at step 0: checkpoint.dir=" +
                            dir + " holds no checkpoint; fix: "));
  CHECK(start({"checkpoint.dir="}, "2").says("begins at step 0: checkpoint.dir is empty"));
}

TEST_CASE("a LibTorch error is shown without its C++ stack") {
  const Ended ended = run_program([](Context&, const Config&) {
    torch::ones({2, 3}).matmul(torch::ones({2, 3}));
  });
  CHECK(ended.code() == 1);
  CHECK(ended.says("mat1 and mat2 shapes cannot be multiplied"));
  CHECK_FALSE(ended.says("frame #0"));
}

TEST_CASE("wrong settings end the program before the function is called") {
  const RunFunction never = [](Context&, const Config&) { std::puts("called"); };
  for (const std::string wrong : {"train.batch_size=0", "train.batchsize=8", "trian.epochs=2",
                                  "--verbose", "word", "amp.dtype=x", "--config=/no/such.yaml"}) {
    const Ended ended = run_program(never, {wrong});
    INFO(wrong << "\n" << ended.output);
    CHECK(ended.code() == 64);
    CHECK_FALSE(ended.says("called"));
    CHECK(ended.says("fix") + ended.says("did you mean") > 0);
  }
}

TEST_CASE("keys that nobody reads are refused when the first step begins") {
  const RunFunction program = [](Context& context, const Config& config) {
    std::printf("depth %d\n", static_cast<int>(config.section<Mine>("mine").depth));
    context.set_progress(0, "forward");
    std::puts("stepped");
  };
  const Ended good = run_program(program, {"mine.depth=5"});
  CHECK(good.code() == 0);
  CHECK(good.says("depth 5"));
  const Ended bad = run_program(program, {"mien.depth=5"});
  CHECK(bad.code() == 64);
  CHECK(bad.says("argument: unknown setting 'mien.depth'; did you mean mine.depth?"));
  CHECK_FALSE(bad.says("stepped"));
  CHECK(run_program([](Context&, const Config&) {}, {"far.off=5"}).code() == 64);
}

TEST_CASE("settings that change nothing end the program with 64") {
  const RunFunction program = [](Context& context, const Config& config) {
    std::puts("called");
    const LrSchedule lr_schedule(config.lr_schedule);
    Metrics metrics(context, config.metrics);
    Checkpointer checkpointer(context, config.checkpoint, {});
    for (int64_t step = checkpointer.restore(); step < config.train.max_steps; ++step) {
      const Autocast autocast(config.amp);  // the last object is made in the first step
      metrics.end_step(step, {.num_samples = 1});
      std::printf("ended step %d\n", static_cast<int>(step));
    }
  };
  const auto run_with = [&](const char* argument) {
    return run_program(program, {"metrics.dir=", "train.max_steps=3", argument});
  };
  for (const char* used : {"amp.dtype=bf16", "lr_schedule.lr=0.5", "metrics.log_every=1"}) {
    const Ended ended = run_with(used);
    INFO(ended.output);
    CHECK(ended.code() == 0);
    CHECK(ended.says("ended step 2"));
  }
  for (const char* unused : {"ddp.bucket_cap_mb=50", "train.batch_size=8", "sampler.seed=3"}) {
    const Ended ended = run_with(unused);
    INFO(ended.output);
    CHECK(ended.code() == 64);
    CHECK(ended.says(std::string(unused) + " changes nothing"));
    CHECK_FALSE(ended.says("ended step 1"));
  }
  const Ended at_start = run_with("train.grad_accum_steps=4");
  CHECK(at_start.code() == 64);
  CHECK(at_start.says("ddp::uses({\"train.grad_accum_steps\"})"));
  CHECK_FALSE(at_start.says("called"));
  // Without a step it is known at the end.
  CHECK(run_program([](Context&, const Config&) {}, {"amp.dtype=bf16"}).code() == 64);
}

TEST_CASE("a training loop announces its steps by itself") {
  const auto loop = [](bool restores) {
    return [restores](Context& context, const Config& config) {
      Metrics metrics(context, config.metrics);
      Checkpointer checkpointer(context, config.checkpoint, {});
      for (int64_t step = restores ? checkpointer.restore() : 0; step < 3; ++step) {
        std::printf("step %d\n", static_cast<int>(step));
        metrics.end_step(step, {.num_samples = 1});
      }
    };
  };
  const auto run_loop = [&](bool restores, const std::string& argument) {
    return run_program(loop(restores), {"metrics.dir=", argument});
  };
  CHECK(run_loop(true, "metrics.log_every=0").code() == 0);
  const Ended at_end_of_step = run_loop(false, "mien.depth=5");
  CHECK(at_end_of_step.code() == 64);
  CHECK(at_end_of_step.says("step 0"));
  CHECK_FALSE(at_end_of_step.says("step 1"));
  const Ended before_first = run_loop(true, "mien.depth=5");
  CHECK(before_first.code() == 64);
  CHECK_FALSE(before_first.says("step 0"));
}

TEST_CASE("--help shows every key and returns 0") {
  const RunFunction never = [](Context&, const Config&) { std::puts("called"); };
  const Ended ended = run_program(never, {"--help"}, {declare_section<Mine>("mine")});
  CHECK(ended.code() == 0);
  CHECK(ended.says("usage: program [--config FILE.yaml] [key=value ...]"));
  CHECK(ended.says("mine.depth=3"));
  for (const SettingRow& row : Config::default_rows()) {
    CHECK(ended.says("  " + row.key + "="));
  }
  CHECK_FALSE(ended.says("called"));
}

TEST_CASE("a signal is a flag until the program asks; a second Ctrl-C is not") {
  const auto stops = [](int number) {
    return [number](Context& context, const Config&) {
      StopSignal stop(context.control_plane());
      for (int step = 0; step < 5; ++step) {
        if (step == 2) {
          raise(number);
        }
        if (stop.should_stop()) {
          throw Stop("stopped after step " + std::to_string(step) + ": " + stop.reason());
        }
      }
    };
  };
  for (const int number : {SIGTERM, SIGUSR1, SIGINT}) {
    const Ended ended = run_program(stops(number));
    INFO(ended.output);
    CHECK(ended.code() == 75);
    CHECK(ended.says("stopped after step 2: rank 0 received SIG"));
  }
  const Ended twice = run_program([](Context&, const Config&) {
    raise(SIGINT);
    raise(SIGINT);
  });
  CHECK(twice.code() == -SIGINT);
}

TEST_CASE("the failure is published before destructors run") {
  const Ended ended = run_program([](Context& context, const Config&) {
    struct Late {
      Context& context;
      ~Late() {
        std::fprintf(stderr, "known in destructor: %d\n", context.control_plane().failed());
      }
    };
    const Late late{context};
    throw DataError("shard 7");
  });
  CHECK(ended.code() == 65);
  CHECK(ended.says("known in destructor: 1"));
}

TEST_CASE("a rank that cannot unwind leaves with the cause's code") {
  const Ended ended = run_program([](Context&, const Config&) {
    struct Stuck {
      ~Stuck() { pause(); }
    };
    const Stuck stuck;
    throw DataError("shard 7");
  });
  CHECK(ended.code() == 65);
  CHECK(ended.says("could not end within 10000 ms"));
}

TEST_CASE("settings reach LibTorch") {
  const Ended ended = run_program(
      [](Context&, const Config&) {
        const char* workspace = std::getenv("CUBLAS_WORKSPACE_CONFIG");
        std::printf("deterministic %d, workspace %s\n",
                    at::globalContext().deterministicAlgorithms(), workspace ? workspace : "none");
      },
      {"train.deterministic=true"});
  CHECK(ended.says("deterministic 1, workspace :4096:8"));
  const RunFunction precision = [](Context&, const Config&) {
    std::printf("cuBLAS %d, cuDNN %d\n", at::globalContext().allowTF32CuBLAS(),
                at::globalContext().allowTF32CuDNN());
  };
  CHECK(run_program(precision).says("cuBLAS 0, cuDNN 1"));
  CHECK(run_program(precision, {"train.allow_tf32=true"}).says("cuBLAS 1, cuDNN 1"));
}

}  // namespace ddp
