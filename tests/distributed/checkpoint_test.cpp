// SPDX-License-Identifier: Apache-2.0
// Checkpoints of several ranks: agreed fallback, agreed stop, bit-exact resume.
#include "ddp/train/checkpoint.hpp"

#include "comm/tuning/group_choices.hpp"
#include "core/settings/setting_row.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ops/shared/choice_book.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "train/trace/trace_merge.hpp"
#include "unit/train/checkpoint/resume_run.hpp"
#include "unit/train/temporary_folder.hpp"

using ddp::test::context;
using testing::ResumeRun;

namespace {

// One folder for all ranks; rank 0 removes it after all have used it.
class SharedFolder {
 public:
  SharedFolder() {
    if (context().is_main()) {
      folder_.emplace();
    }
    path_ = context().control_plane().broadcast(folder_ ? folder_->path() : "");
  }
  ~SharedFolder() { context().control_plane().barrier(); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::optional<testing::TemporaryFolder> folder_;
  std::string path_;
};

ddp::CheckpointOptions options_in(const SharedFolder& folder) {
  ddp::CheckpointOptions options;
  options.dir = folder.file("ckpt");
  return options;
}

void save_after_one_step(const testing::ResumeCase& setup, const SharedFolder& folder) {
  ResumeRun run(setup, context().communicator());
  ddp::Checkpointer checkpointer(context(), options_in(folder), {run.model, run.optimizer});
  REQUIRE(checkpointer.restore() == 0);
  run.step();
  checkpointer.save(0);
  checkpointer.wait();
}

// A step trains the discriminator on random data, then freezes it and trains the generator with it.
struct Gan {
  explicit Gan(const testing::ResumeCase& run_case)
      : generator(run_case, context().communicator()),
        discriminator(run_case, context().communicator()) {}
  ddp::Checkpointer make_checkpointer(const ddp::CheckpointOptions& chosen) {
    return {context(),
            chosen,
            {{"generator", generator.model},
             {"generator_optimizer", generator.optimizer},
             {"discriminator", discriminator.model},
             {"discriminator_optimizer", discriminator.optimizer}}};
  }
  void step() {
    set_frozen(false);
    discriminator.step();
    set_frozen(true);
    discriminator.optimizer->zero_grad();
    generator.optimizer->zero_grad();
    const auto noise = torch::randn({8, 6}).to(context().device(), at::kBFloat16);
    const auto fake = torch::constant_pad_nd(generator.model.forward(noise), {0, 2});
    discriminator.model.forward(fake).to(at::kFloat).mean().backward();
    generator.optimizer->step(0.05);
  }
  void set_frozen(bool on) {
    for (const auto& parameter : discriminator.model.named_parameters()) {
      parameter.tensor.set_requires_grad(!on);
    }
  }
  ResumeRun generator, discriminator;
};

}  // namespace

TEST_CASE("measured choices are saved and pinned on resume") {
  SharedFolder folder;
  const testing::ResumeCase setup{testing::Precision::Fp32, ddp::OptimizerType::Sgd, 1};
  auto& plan = context().communicator()->choices().plan();
  plan.set("a measured choice", "[1,2]");
  auto& book = ddp::ops::detail::ChoiceBook::instance();
  book.note("a convolution", 7, 2 + static_cast<size_t>(context().rank()));  // differs per rank
  save_after_one_step(setup, folder);
  plan.set("a measured choice", "[3]");  // a later measurement differs
  book.note("a convolution", 7, 1);
  ResumeRun run(setup, context().communicator());
  ddp::Checkpointer checkpointer(context(), options_in(folder), {run.model, run.optimizer});
  CHECK(checkpointer.restore() == 1);
  CHECK(plan.find("a measured choice") == "[1,2]");
  CHECK(book.find("a convolution", 7) == 2);  // rank 0's
}

TEST_CASE("a damaged plan in a checkpoint does not hold up a resume") {
  SharedFolder folder;
  const testing::ResumeCase setup{testing::Precision::Fp32, ddp::OptimizerType::Sgd, 1};
  auto& plan = context().communicator()->choices().plan();
  const std::string table = "[[1024,10.0,0.0],[2048,12.0,0.0]]";
  plan.set("all_reduce", R"("no table")");
  save_after_one_step(setup, folder);
  plan.set("all_reduce", table);
  ResumeRun run(setup, context().communicator());
  ddp::Checkpointer checkpointer(context(), options_in(folder), {run.model, run.optimizer});
  CHECK(checkpointer.restore() == 1);
  CHECK(plan.find("all_reduce") == table);
}

TEST_CASE("ranks resume bit for bit, each with its own random numbers") {
  const bool async = GENERATE(false, true);
  const auto precision = GENERATE(testing::Precision::Fp32, testing::Precision::Bf16Leaves);
  SharedFolder folder;
  auto options = options_in(folder);
  options.async = async;
  const testing::ResumeCase setup{precision, ddp::OptimizerType::AdamW, 2};

  ResumeRun undisturbed(setup, context().communicator());  // ddp.seed_ranks: own numbers
  for (int step = 0; step < 8; ++step) {
    undisturbed.step();
  }
  {
    ResumeRun first(setup, context().communicator());
    ddp::Checkpointer checkpointer(context(), options,
                                   {first.model, first.optimizer, first.scaler});
    REQUIRE(checkpointer.restore() == 0);
    for (int step = 0; step < 4; ++step) {
      first.step();
      if (step == 3) {
        checkpointer.save(step);
      }
    }
  }
  ResumeRun second(setup, context().communicator());
  ddp::Checkpointer checkpointer(context(), options,
                                 {second.model, second.optimizer, second.scaler});
  REQUIRE(checkpointer.restore() == 4);
  for (int step = 4; step < 8; ++step) {
    second.step();
  }
  REQUIRE(testing::first_difference(undisturbed.tensors(), second.tensors()) == "");
  REQUIRE(std::equal(second.losses.begin(), second.losses.end(), undisturbed.losses.begin() + 4));
  // Data and dropout differed between the ranks; the reduced weights were equal.
  if (context().world_size() > 1) {
    const auto losses = context().control_plane().all_gather(std::to_string(second.losses.back()));
    REQUIRE(losses[0] != losses[1]);
  }
}

TEST_CASE("ranks resume a GAN bit for bit from one checkpoint") {
  SharedFolder folder;
  const auto options = options_in(folder);
  const testing::ResumeCase setup{testing::Precision::Bf16Leaves, ddp::OptimizerType::Adam, 1};
  Gan undisturbed(setup);
  for (int step = 0; step < 8; ++step) {
    undisturbed.step();
  }
  {
    Gan first(setup);
    auto checkpointer = first.make_checkpointer(options);
    REQUIRE(checkpointer.restore() == 0);
    for (int step = 0; step < 5; ++step) {  // the last step is lost
      first.step();
      if (step == 3) {
        checkpointer.save(step);
      }
    }
  }
  Gan second(setup);
  auto checkpointer = second.make_checkpointer(options);
  REQUIRE(checkpointer.restore() == 4);
  for (int step = 4; step < 8; ++step) {
    second.step();
  }
  for (auto run : {&Gan::generator, &Gan::discriminator}) {
    REQUIRE(testing::first_difference((undisturbed.*run).tensors(), (second.*run).tensors()) == "");
  }
}

TEST_CASE("a checkpoint damaged for the last rank alone is skipped by all") {
  SharedFolder folder;
  const auto options = options_in(folder);
  ResumeRun run({}, context().communicator());
  {
    ddp::Checkpointer checkpointer(context(), options, {run.model, run.optimizer});
    for (int step = 0; step < 2; ++step) {
      run.step();
      checkpointer.save(step);
    }
  }
  context().control_plane().barrier();
  if (context().rank() == context().world_size() - 1) {
    char name[40];
    std::snprintf(name, sizeof name, "/step_0000000002/rank_%05d.safetensors", context().rank());
    auto bytes = testing::read_file(options.dir + name);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    testing::write_file(options.dir + name, bytes);
  }
  context().control_plane().barrier();
  ddp::Checkpointer checkpointer(context(), options, {run.model, run.optimizer});
  REQUIRE(checkpointer.restore() == 1);
}

TEST_CASE("a stop asked of one rank stops all after the same step, saved") {
  SharedFolder folder;
  auto options = options_in(folder);
  options.stop_check_seconds = 0.05;
  ResumeRun run({}, context().communicator());
  ddp::Checkpointer checkpointer(context(), options, {run.model, run.optimizer});
  ddp::clear_stop_request();
  int64_t step = checkpointer.restore();
  bool stopped = false;
  try {
    for (; step < 100'000; ++step) {
      run.step();
      if (step == 7 && context().rank() == context().world_size() - 1) {
        ddp::request_stop();
      }
      checkpointer.save_if_due(step);
    }
  } catch (const ddp::Stop&) {
    stopped = true;
  }
  ddp::clear_stop_request();
  REQUIRE(stopped);
  REQUIRE(context().control_plane().require_equal("the step", std::to_string(step)) ==
          std::to_string(step));
  REQUIRE(ddp::detail::list_checkpoints(options.dir).front().step == step + 1);
}

TEST_CASE("clocks of one host are found equal over the real control plane") {
  const auto offset = ddp::detail::measure_clock_offset(context().control_plane());
  REQUIRE(std::abs(offset.offset_ns) <= offset.error_ns);
  REQUIRE(offset.error_ns < 50'000'000);
}
