// SPDX-License-Identifier: Apache-2.0
// Runs ddp::run in child processes, because it decides how a process ends.
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/settings/setting_row.hpp"
#include "ddp/amp/amp.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/metrics.hpp"
#include "ddp/train/run.hpp"
#include "train/program/help_version.hpp"
#include "unit/train/child_process.hpp"

namespace ddp {
namespace {

using testing::end_of;
using testing::Ended;
using testing::run_program;
using testing::start_child;

struct Mine {
  int64_t depth = 3;
};
void describe_fields(Mine& options, FieldVisitor& visitor) {
  visitor.field({.name = "depth", .doc = "of the tree", .min = 1}, options.depth);
}

}  // namespace

TEST_CASE("a successful run returns 0") {
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

TEST_CASE("a LibTorch error is shown without its C++ stack") {
  const Ended ended = run_program([](Context&, const Config&) {
    torch::ones({2, 3}).matmul(torch::ones({2, 3}));
  });
  CHECK(ended.code() == 1);
  CHECK(
      ended.says("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3); "
                 "TORCH_SHOW_CPP_STACKTRACES=1 prints its C++ frames"));
  CHECK_FALSE(ended.says("frame #0"));
  CHECK_FALSE(ended.says("at::_ops::"));
}

namespace {

torch::Tensor multiply_wrong_shapes() {
  return torch::ones({2, 3}).matmul(torch::ones({2, 3}));
}

// As the loader does with errors of a data set.
void nest_an_error() {
  try {
    multiply_wrong_shapes();
  } catch (const std::exception&) {
    std::throw_with_nested(DataError("sample 7 is wrong"));
  }
}

}  // namespace

TEST_CASE("TORCH_SHOW_CPP_STACKTRACES prints the frames of a LibTorch error, and of a nested one") {
  for (const bool is_nested : {false, true}) {
    const Ended ended = end_of(start_child([&] {
      setenv("TORCH_SHOW_CPP_STACKTRACES", "1", /*overwrite=*/1);
      const char* words[] = {"program", "context.device=cpu"};
      return run(2, words, [&](Context&, const Config&) {
        is_nested ? nest_an_error() : static_cast<void>(multiply_wrong_shapes());
      });
    }));
    INFO(ended.output);
    CHECK(ended.code() == (is_nested ? 65 : 1));
    const auto op = ended.output.find("at::_ops::matmul::call(");
    const auto own = ended.output.find("multiply_wrong_shapes() in ");
    CHECK(op != std::string::npos);
    CHECK(own != std::string::npos);
    CHECK(op < own);
    CHECK_FALSE(ended.says("TORCH_SHOW_CPP_STACKTRACES=1"));
  }
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

TEST_CASE("keys that nobody reads are refused before the function is called") {
  const RunFunction program = [](Context&, const Config& config) {
    std::printf("depth %d\n", static_cast<int>(config.section<Mine>("mine").depth));
  };
  const std::vector<Section> sections{declare_section<Mine>("mine")};
  const Ended good = run_program(program, {"mine.depth=5"}, sections);
  CHECK(good.code() == 0);
  CHECK(good.says("depth 5"));
  const Ended bad = run_program(program, {"mien.depth=5"}, sections);
  CHECK(bad.code() == 64);
  CHECK(bad.says("argument: unknown setting 'mien.depth'; did you mean mine.depth?"));
  CHECK_FALSE(bad.says("depth 3"));
  CHECK(run_program([](Context&, const Config&) {}, {"far.off=5"}).code() == 64);
}

TEST_CASE("settings without an effect end the program with 64") {
  const RunFunction program = [](Context& context, const Config& config) {
    std::puts("called");
    const LrSchedule lr_schedule(config.lr_schedule);
    Metrics metrics(context, config.metrics);
    Checkpointer checkpointer(context, config.checkpoint, {});
    const int64_t first = checkpointer.restore();
    metrics.begin(first);  // announces the first step, as restore() does
    for (int64_t step = first; step < config.train.max_steps; ++step) {
      const Autocast autocast(config.amp);  // the first step creates the last object
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
    CHECK(ended.says(std::string(unused) + " has no effect"));
    CHECK_FALSE(ended.says("ended step 1"));
  }
  const Ended at_start = run_with("train.grad_accum_steps=4");
  CHECK(at_start.code() == 64);
  CHECK(at_start.says("ddp::uses({\"train.grad_accum_steps\"})"));
  CHECK_FALSE(at_start.says("called"));
  // A run without steps reports it at the end.
  CHECK(run_program([](Context&, const Config&) {}, {"amp.dtype=bf16"}).code() == 64);
}

TEST_CASE("settings without an effect end the program before its first backward") {
  const RunFunction program = [](Context& context, const Config& config) {
    DistributedDataParallel model(torch::nn::Linear(1, 1), context.communicator(), config.ddp);
    {
      const torch::NoGradGuard evaluation;  // is no step
      model.forward(torch::ones({1, 1}));
    }
    model.forward(torch::ones({1, 1}));  // a trial, before all objects are made
    context.set_progress(0, "training");
    const LrSchedule lr_schedule(config.lr_schedule);
    torch::Tensor loss;
    {
      const Autocast autocast(config.amp);
      std::puts("forward");
      loss = model.forward(torch::ones({1, 1})).sum();
    }
    std::puts("backward");
    loss.backward();
  };
  const Ended used = run_program(program, {"lr_schedule.lr=0.5", "amp.dtype=bf16"});
  INFO(used.output);
  CHECK(used.code() == 0);
  CHECK(used.says("backward"));
  const Ended unused = run_program(program, {"lr_schedule.lr=0.5", "sampler.seed=3"});
  INFO(unused.output);
  CHECK(unused.code() == 64);
  CHECK(unused.says("argument: sampler.seed=3 has no effect"));
  CHECK(unused.says("forward"));
  CHECK_FALSE(unused.says("backward"));
}

TEST_CASE("a program that ends without a training step says so") {
  const RunFunction program = [](Context& context, const Config& config) {
    Metrics metrics(context, config.metrics);
    for (int64_t step = 0; step < 2 * config.train.epochs; ++step) {
      metrics.end_step(step, {.num_samples = 1});
    }
  };
  const Ended none = run_program(program, {"metrics.dir="});
  CHECK(none.code() == 0);
  CHECK(
      none.says("without a training step (train.epochs=0, train.max_steps=1000); fix: set "
                "train.epochs, or loop over cfg.train.num_steps(...)"));
  const Ended two = run_program(program, {"metrics.dir=", "train.epochs=1"});
  CHECK(two.code() == 0);
  CHECK_FALSE(two.says("without a training step"));
}

TEST_CASE("a training loop announces its steps automatically") {
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
  // A setting without effect is refused when the second step is announced.
  const Ended restored = run_loop(true, "sampler.seed=3");
  CHECK(restored.code() == 64);
  CHECK(restored.says("step 0"));
  CHECK_FALSE(restored.says("step 1"));
  const Ended first_announced_at_its_end = run_loop(false, "sampler.seed=3");
  CHECK(first_announced_at_its_end.code() == 64);
  CHECK(first_announced_at_its_end.says("step 1"));
  CHECK_FALSE(first_announced_at_its_end.says("step 2"));
}

TEST_CASE("--help shows a page or a topic and returns 0, an unknown topic returns 64") {
  const RunFunction never = [](Context&, const Config&) { std::puts("the function ran"); };
  const auto show = [&](const std::vector<std::string>& arguments, int code) {
    const Ended ended = run_program(never, arguments, {declare_section<Mine>("mine")});
    INFO(ended.output);
    CHECK(ended.code() == code);
    CHECK_FALSE(ended.says("the function ran"));
    return ended;
  };
  const Ended page = show({"--help"}, 0);
  CHECK(page.says("usage: program [--config FILE.yaml] [key=value ...]"));
  CHECK(page.says("\n  mine         depth\n"));
  CHECK(page.says("train.max_steps=1000"));
  CHECK_FALSE(page.says("train.deterministic"));
  const Ended all = show({"--help", "all"}, 0);
  CHECK(all.says("mine.depth=3"));
  for (const SettingRow& row : Config::default_rows()) {
    CHECK(all.says("  " + row.key + "="));
  }
  CHECK(show({"--help", "mine.depth"}, 0).output ==
        "mine\n  mine.depth=3\n      of the tree\n      Allowed: integer >= 1\n");
  CHECK(show({"--help", "trian"}, 64).says("did you mean train?"));
}

TEST_CASE("--version and --completion print and return 0") {
  const RunFunction never = [](Context&, const Config&) { std::puts("the function ran"); };
  const Ended version = run_program(never, {"--version"});
  CHECK(version.code() == 0);
  CHECK(version.output == detail::version_text());
  for (const char* name : {"libddp    0.", "LibTorch  " TORCH_VERSION "\n", "CUDA      ",
                           "NCCL      ", "cuDNN     ", "MPI       "}) {
    INFO(name << " in " << version.output);
    CHECK(version.says(name));
  }
  const Ended script = run_program(never, {"--completion", "bash"});
  CHECK(script.code() == 0);
  CHECK(script.says("complete -F _ddp_complete_program program\n"));
  CHECK_FALSE(script.says("the function ran"));
}

TEST_CASE("the start shows changed settings, with --show-settings all") {
  const std::vector<Section> sections = {declare_section<Mine>("mine"), uses({"train"})};
  const RunFunction nothing = [](Context&, const Config&) {};
  const auto starts = [&](const std::vector<std::string>& arguments) {
    const Ended ended = run_program(nothing, arguments, sections);
    INFO(ended.output);
    CHECK(ended.code() == 0);
    return ended;
  };
  const Ended changed = starts({"mine.depth=5", "train.epochs=2"});
  CHECK(changed.says("changed settings; --show-settings lists all\n  train.epochs    2 epochs\n"));
  CHECK(changed.says("  mine.depth      5\n"));
  CHECK_FALSE(changed.says("train.batch_size"));
  const Ended all = starts({"mine.depth=5", "--show-settings"});
  CHECK(all.says("* mine.depth "));
  CHECK(all.says("  train.batch_size "));
}

TEST_CASE("a signal sets a flag; a second Ctrl-C ends the program") {
  const auto stops = [](int number) {
    return [number](Context& context, const Config&) {
      for (int step = 0; step < 5; ++step) {
        if (step == 2) {
          raise(number);
        }
        if (context.control_plane().agree_any(stop_requested())) {
          throw Stop("stopped after step " + std::to_string(step));
        }
      }
    };
  };
  for (const int number : {SIGTERM, SIGUSR1, SIGINT}) {
    const Ended ended = run_program(stops(number));
    INFO(ended.output);
    CHECK(ended.code() == 75);
    CHECK(ended.says("stopped after step 2"));
  }
  const Ended twice = run_program([](Context&, const Config&) {
    raise(SIGINT);
    raise(SIGINT);
  });
  CHECK(twice.code() == -SIGINT);
}

TEST_CASE("a stop before the first step ends a program that checks nothing") {
  const auto begin = std::chrono::steady_clock::now();
  const Ended ended = run_program([](Context&, const Config&) {
    raise(SIGTERM);
    std::this_thread::sleep_for(std::chrono::seconds(60));  // loads weights, for example
  });
  INFO(ended.output);
  CHECK(ended.code() == 75);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("a stop leaves programs alone that may have something to save") {
  using Mark = std::function<void(Context&)>;
  const Mark announces = [](Context& context) { context.set_progress(0, "training"); };
  const Mark asks = [](Context&) { stop_requested(); };
  const Mark trains = [](Context& context) {
    DistributedDataParallel model(torch::nn::Linear(1, 1), context.communicator());
    model.forward(torch::ones({1, 1})).sum().backward();
  };
  std::vector<testing::Running> programs;  // at the same time, because each waits
  for (const Mark& mark : {announces, asks, trains}) {
    programs.push_back(testing::start_program([&](Context& context, const Config&) {
      mark(context);
      raise(SIGTERM);
      std::this_thread::sleep_for(std::chrono::milliseconds(1300));
      std::fprintf(stderr, "ended: %d\n", context.control_plane().failed());
    }));
  }
  for (const auto& program : programs) {
    const Ended ended = end_of(program);
    INFO(ended.output);
    CHECK(ended.says("ended: 0"));
    CHECK(ended.code() == 0);
  }
}

TEST_CASE("the failure is published before the context is destroyed") {
  const Ended ended = run_program([](Context& context, const Config&) {
    context.add_teardown([&context] {
      std::fprintf(stderr, "known in teardown: %d\n", context.control_plane().failed());
    });
    throw DataError("shard 7");
  });
  CHECK(ended.code() == 65);
  CHECK(ended.says("known in teardown: 1"));
}

TEST_CASE("a collective that a destructor calls while an exception unwinds is refused") {
  const Ended ended = run_program([](Context& context, const Config&) {
    struct Waits {
      Context& context;
      ~Waits() {
        try {
          context.communicator()->barrier();
        } catch (const std::exception& error) {
          std::fprintf(stderr, "refused: %s\n", error.what());
        }
      }
    };
    { const Waits waits{context}; }
    std::fprintf(stderr, "went on\n");
    const Waits waits{context};
    throw DataError("shard 7");
  });
  CHECK(ended.code() == 65);
  CHECK(ended.says("went on\nrefused: barrier: a destructor called it while an exception unwinds"));
}

TEST_CASE("a rank that cannot unwind exits with the cause's code") {
  const Ended ended = run_program([](Context& context, const Config&) {
    context.add_teardown([] { pause(); });
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
