// SPDX-License-Identifier: Apache-2.0
// What ddp::run says where a program would otherwise go on in silence.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/metrics.hpp"
#include "ddp/train/run.hpp"
#include "unit/train/child_process.hpp"

namespace ddp {

using testing::end_of;
using testing::Ended;
using testing::run_program;
using testing::start_child;

TEST_CASE("on one rank the cause is the first word of a failure") {
  const auto log_of = [](const RunFunction& function) { return run_program(function).output; };
  const auto early = log_of([](Context&, const Config&) { throw std::runtime_error("my bug"); });
  INFO(early);
  CHECK(early.find("first cause: my bug (rank 0 before the first step)\n") != std::string::npos);
  const auto late = log_of([](Context& context, const Config&) {
    context.set_progress(41, "bucket 3");
    throw std::runtime_error("my bug");
  });
  INFO(late);
  CHECK(late.find("first cause: my bug (rank 0 at step 41 in bucket 3)\n") != std::string::npos);
}

TEST_CASE("a program that does not read the length of the run refuses it in its second step") {
  const auto loop = [](bool reads_late, bool announces) {
    return [=](Context& context, const Config& config) {
      DistributedDataParallel model(torch::nn::Linear(1, 1), context.communicator(), config.ddp);
      for (int64_t step = 0; step < 6; ++step) {
        if (announces) {
          context.set_progress(step, "training");
        }
        model.forward(torch::ones({1, 1})).sum().backward();
        std::printf("ended step %d\n", static_cast<int>(step));
        if (reads_late && step + 1 == config.train.max_steps) {
          return;
        }
      }
    };
  };
  for (const bool announces : {true, false}) {
    const Ended ignored = run_program(loop(false, announces), {"train.max_steps=4"});
    INFO(ignored.output);
    CHECK(ignored.code() == 64);
    CHECK(
        ignored.says("argument: train.max_steps=4 has no effect: this program's loop does not "
                     "read it; fix: leave it out, or declare it in ddp::run"));
    CHECK_FALSE(ignored.says("ended step 2"));
    const Ended obeyed = run_program(loop(true, announces), {"train.max_steps=4"});
    INFO(obeyed.output);
    CHECK(obeyed.code() == 0);
    CHECK(obeyed.says("ended step 3"));
  }
  CHECK(run_program(loop(false, true), {"train.epochs=2"}).says("train.epochs=2 has no effect"));
  CHECK(run_program(loop(false, true), {"train.epochs=2"}, {uses({"train.epochs"})}).code() == 0);
  CHECK(run_program([](Context&, const Config&) {}, {"train.max_steps=4"}).code() == 64);
}

TEST_CASE("only one of two values for a key counts, and the program says which") {
  const RunFunction program = [](Context&, const Config& config) {
    std::printf("epochs %d\n", static_cast<int>(config.train.epochs));
  };
  const Ended twice = run_program(program, {"train.epochs=1", "train.epochs=2"});
  INFO(twice.output);
  CHECK(twice.code() == 0);
  CHECK(
      twice.says("the command line has train.epochs=1 and later train.epochs=2: the later one "
                 "counts"));
  CHECK(twice.says("epochs 2"));
  CHECK_FALSE(run_program(program, {"train.epochs=2"}).says("the later one counts"));
}

TEST_CASE("a program that only evaluates is not told that it did not train") {
  const auto program = [](bool loops) {
    return [=](Context& context, const Config& config) {
      Metrics metrics(context, config.metrics);
      DistributedDataParallel model(torch::nn::Linear(1, 1), context.communicator(), config.ddp);
      if (loops) {
        metrics.begin(0, 0);  // a loop without a step, and an evaluation behind it
      }
      const torch::NoGradGuard evaluation;
      model.forward(torch::ones({1, 1}));
    };
  };
  const Ended evaluates = run_program(program(false), {"metrics.dir="});
  INFO(evaluates.output);
  CHECK(evaluates.code() == 0);
  CHECK_FALSE(evaluates.says("without a training step"));
  CHECK(run_program(program(true), {"metrics.dir="}).says("without a training step"));
}

TEST_CASE("GPUs that were given but do not answer end a program with 64, unless it wants the CPU") {
  const auto run_on = [](const char* device) {
    return end_of(start_child([device] {
      setenv("CUDA_VISIBLE_DEVICES", "7777", 1);  // no host has so many
      const char* words[] = {"program", device};
      return run(2, words, [](Context& context, const Config&) {
        std::printf("trains on %s\n", context.device().str().c_str());
      });
    }));
  };
  const Ended refused = run_on("context.device=auto");
  INFO(refused.output);
  CHECK(refused.code() == 64);
  CHECK(refused.says("context.device=auto finds no usable GPU on "));
  CHECK(refused.says("CUDA_VISIBLE_DEVICES is set (7777)"));
  CHECK(refused.says("or choose the CPU by context.device=cpu"));
  CHECK_FALSE(refused.says("trains on"));
  const Ended wanted = run_on("context.device=cpu");
  INFO(wanted.output);
  CHECK(wanted.code() == 0);
  CHECK_FALSE(wanted.says("CUDA_VISIBLE_DEVICES"));
}

TEST_CASE("a process that a scheduler's launcher did not start says that it runs alone") {
  const auto run_alone = [](const char* tasks) {
    return end_of(start_child([tasks] {
      setenv("SLURM_JOB_ID", "4", 1);
      setenv("SLURM_NTASKS", tasks, 1);
      const char* words[] = {"program", "context.device=cpu"};
      return run(2, words, [](Context&, const Config&) {});
    }));
  };
  const Ended told = run_alone("8");
  INFO(told.output);
  CHECK(told.code() == 0);
  CHECK(told.says("this process runs alone, but SLURM_NTASKS=8"));
  CHECK_FALSE(run_alone("1").says("runs alone"));
}

}  // namespace ddp
