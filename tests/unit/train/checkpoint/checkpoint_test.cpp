// SPDX-License-Identifier: Apache-2.0
// Contents of a checkpoint, and what restoring returns.
#include <torch/torch.h>

#include <memory>

#include "ddp/core/safetensors.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/checkpoint.hpp"
#include "support/catch.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

using ddp::Resume;
using ddp::StateDict;
using testing::Box;
using testing::Loader;
using testing::message_of;
using testing::names_in;
using testing::options_in;
using testing::Run;
using testing::run_ranks;
using testing::same_bits;
using testing::small_model;
using testing::TemporaryFolder;
using testing::ThreadControlPlane;
using testing::ThreadJob;

TEST_CASE("a resumed run gives the bits of an uninterrupted run") {
  const bool async = GENERATE(false, true);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = async;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);

  Run undisturbed(dtype);
  for (int step = 0; step < 20; ++step) {
    undisturbed.step();
  }

  std::vector<double> losses;
  {
    Run first(dtype);
    auto model = first.model(), optimizer = first.optimizer();
    Loader loader(first.position);
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer, loader});
    REQUIRE(checkpointer.restore() == 0);
    for (int step = 0; step < 10; ++step) {
      first.step();
    }
    checkpointer.save(9);
    losses = first.losses;
    first.step();  // lost with the process; must not be in the checkpoint
  }
  {
    Run second(dtype);
    second.weight.zero_();
    torch::rand(17);  // advances the generator
    auto model = second.model(), optimizer = second.optimizer();
    Loader loader(second.position);
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer, loader});
    int64_t step = checkpointer.restore();
    REQUIRE(step == 10);
    for (; step < 20; ++step) {
      second.step();
    }
    losses.insert(losses.end(), second.losses.begin(), second.losses.end());
    REQUIRE(same_bits(second.weight, undisturbed.weight));
    REQUIRE(same_bits(second.momentum, undisturbed.momentum));
    REQUIRE(second.position == undisturbed.position);
    REQUIRE(losses == undisturbed.losses);
  }
}

TEST_CASE("files use the names that other programs know") {
  TemporaryFolder folder;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Run run;
  auto model = run.model(), optimizer = run.optimizer();
  auto options = options_in(folder);
  options.settings_text = "a: 1\n";
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer});
  checkpointer.save(0);
  checkpointer.wait();
  const auto dir = options.dir + "/step_0000000001/";
  const auto weights = ddp::load_safetensors(dir + "model.safetensors").tensors;
  REQUIRE(weights.size() == 1);
  REQUIRE(same_bits(weights.at("fc.weight"), run.weight));
  const auto state = ddp::load_safetensors(dir + "optimizer.safetensors").tensors;
  REQUIRE(state.count("optimizer.state.fc.weight.momentum_buffer") == 1);
  const auto mine = ddp::load_safetensors(dir + "rank_00000.safetensors").tensors;
  REQUIRE(mine.count("rng.cpu") == 1);
  const auto manifest =
      ddp::detail::check_checkpoint(options.dir, {.step = 1, .name = "step_0000000001"});
  REQUIRE(manifest.texts.at("settings") == "a: 1\n");
}

TEST_CASE("a model's file holds its leaves, its optimizer's their fp32 masters") {
  TemporaryFolder folder;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  const auto options = options_in(folder);
  // Two models whose parameters have one name, and the optimizer of one of them.
  struct Models {
    explicit Models(double value)
        : leaf(torch::full({3, 2}, value, at::kBFloat16).set_requires_grad(true)),
          optimizer(ddp::make_optimizer({{"w", leaf}}, {})),
          model("g", {.tensors = {{"w", leaf.detach()}, {"b", torch::ones(2)}}, .values = {}}),
          other("a", {.tensors = {{"w", torch::zeros({3, 2}, at::kBFloat16)}}, .values = {}}) {}
    at::Tensor master() { return optimizer->state_dict().tensors.at("state.w.master").clone(); }
    at::Tensor leaf;
    std::unique_ptr<ddp::Optimizer> optimizer;
    Box model, other;
  };
  Models saved(1.0);
  saved.leaf.mutable_grad() = torch::ones({3, 2});
  saved.optimizer->step(0.001);  // below half of bfloat16's spacing: only the master moves
  const auto master = saved.master();
  REQUIRE_FALSE(master.equal(saved.leaf.to(at::kFloat)));
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options,
                                   {saved.other, saved.optimizer, saved.model});
    checkpointer.save(4);
  }
  const auto dir = options.dir + "/step_0000000005/";
  REQUIRE(same_bits(ddp::load_safetensors(dir + "g.safetensors").tensors.at("g.w"),
                    saved.leaf.detach()));
  REQUIRE(same_bits(
      ddp::load_safetensors(dir + "optimizer.safetensors").tensors.at("optimizer.state.w.master"),
      master));
  Models loaded(7.0);
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options,
                                   {loaded.other, loaded.optimizer, loaded.model});
    REQUIRE(checkpointer.restore() == 5);
  }
  REQUIRE(same_bits(loaded.leaf.detach(), saved.leaf.detach()));
  REQUIRE(same_bits(loaded.master(), master));
}

TEST_CASE("masters of an object that is no optimizer are loaded by one") {
  TemporaryFolder folder;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  const auto options = options_in(folder);
  const auto leaf = torch::full({3}, 2.0, at::kBFloat16).set_requires_grad(true);
  auto optimizer = ddp::make_optimizer({{"w", leaf}}, {});
  const auto make_model = [&] {
    return Box("g", {.tensors = {{"w", leaf.detach()}}, .values = {}});
  };
  {
    auto state = optimizer->state_dict();
    state.tensors["state.w.master"] = torch::full({3}, 2.001);
    Box model = make_model(), separate("g_optimizer", state);  // a Box is no Optimizer
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, separate});
    checkpointer.save(0);
  }
  Box model = make_model();
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, {"g_optimizer", optimizer}});
  REQUIRE(checkpointer.restore() == 1);
  REQUIRE(same_bits(optimizer->state_dict().tensors.at("state.w.master"), torch::full({3}, 2.001)));
}

TEST_CASE("a damaged newest checkpoint on one rank alone makes all ranks fall back together") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = GENERATE(false, true);
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto model = small_model();
    // A rank's own state returns to that rank.
    Box hook("hook", {.tensors = {{"rank_local.residual", torch::zeros(2)}}, .values = {}});
    {
      ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, hook});
      REQUIRE(checkpointer.restore() == 0);
      for (int step = 0; step < 3; ++step) {
        model.state.tensors["w"].fill_(step);
        hook.state.tensors["rank_local.residual"].fill_(step + 0.5 * plane.rank());
        checkpointer.save(step);
      }
    }
    plane.barrier();
    if (plane.rank() == 0) {  // damages rank 1's own data
      const auto path = options.dir + "/step_0000000003/rank_00001.safetensors";
      auto bytes = testing::read_file(path);
      bytes[bytes.size() / 2] ^= 4;
      testing::write_file(path, bytes);
    }
    plane.barrier();
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, hook});
    REQUIRE(checkpointer.restore() == 2);
    REQUIRE(model.state.tensors["w"].equal(torch::full(3, 1.0)));
    REQUIRE(
        hook.state.tensors["rank_local.residual"].equal(torch::full(2, 1 + 0.5 * plane.rank())));
    // New checkpoints count as newer than the damaged one only after reaching its step.
    checkpointer.save(2);
    checkpointer.wait();
    REQUIRE(checkpointer.last_saved_step() == 3);
  });
  REQUIRE(message_of<std::exception>(errors[0]) == "");
  REQUIRE(message_of<std::exception>(errors[1]) == "");
  REQUIRE(names_in(options.dir).front() == "step_0000000003.1");
}

TEST_CASE("without a complete checkpoint a restore throws and never starts at step 0") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  auto model = small_model();
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.save(0);
  }
  const auto path = options.dir + "/step_0000000001/model.safetensors";
  const auto good = testing::read_file(path);
  const auto restore = [&](Resume resume, Box& object) {
    auto changed = options;
    changed.resume = resume;
    ddp::Checkpointer checkpointer(plane, at::kCPU, changed, {object});
    return checkpointer.restore();
  };
  testing::write_file(path, good.substr(0, good.size() - 1));
  REQUIRE_THROWS_AS(restore(Resume::Auto, model), ddp::ReadError);
  testing::write_file(path, good);
  REQUIRE(restore(Resume::Auto, model) == 1);
  REQUIRE_THROWS_AS(restore(Resume::Never, model), ddp::SettingsError);

  Box other("model", {.tensors = {{"v", torch::zeros(3)}}, .values = {}});
  REQUIRE_THROWS_AS(restore(Resume::Auto, other), ddp::MismatchError);
  REQUIRE_THROWS_WITH(restore(Resume::Auto, other),
                      Catch::Contains("the checkpoint " + options.dir +
                                      "/step_0000000001 does not fit: missing key v") &&
                          Catch::Contains("fix: set another checkpoint.dir, or use the settings"));
  Box unknown("ema", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
  REQUIRE_THROWS_AS(restore(Resume::Auto, unknown), ddp::MismatchError);

  // A newer format is an error even though an older checkpoint would load.
  auto& ops = ddp::system_file_ops();
  ddp::detail::commit_save(ops, options.dir, ddp::detail::begin_save(ops, options.dir, 5),
                           {.format = ddp::detail::kCheckpointFormat + 1, .step = 5});
  REQUIRE_THROWS_WITH(restore(Resume::Auto, model), Catch::Contains("use a newer libddp"));

  std::filesystem::remove_all(options.dir);
  REQUIRE(restore(Resume::Auto, model) == 0);
  REQUIRE_THROWS_AS(restore(Resume::Require, model), ddp::ReadError);
}

TEST_CASE("a complete checkpoint is kept if a resume skipped a newer one with flipped bits") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_last = 2;
  auto model = small_model();
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.save(1);
    checkpointer.save(3);
  }
  const auto path = options.dir + "/step_0000000004/model.safetensors";
  auto bytes = testing::read_file(path);
  bytes.back() ^= 1;
  testing::write_file(path, bytes);
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
  REQUIRE(checkpointer.restore() == 2);
  checkpointer.save(3);
  checkpointer.wait();
  REQUIRE(names_in(options.dir) ==
          std::vector<std::string>{"step_0000000004.1", "step_0000000004", "step_0000000002"});
}

TEST_CASE("an empty pointer in a checkpointer's list is refused") {
  const std::unique_ptr<Box> none;
  REQUIRE_THROWS_WITH(ddp::StatefulRef(none), Catch::Contains("holds an empty pointer"));
}

TEST_CASE("objects need different names") {
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box a("model", {}), b("model", {}), c("rank_0", {}), d("a/b", {});
  auto owned = std::make_unique<Box>("owned", StateDict{});
  REQUIRE_THROWS_WITH(ddp::Checkpointer(plane, at::kCPU, {}, {a, b}),
                      Catch::Contains("named 'model'; fix: give one another name in the list, "
                                      "{\"other_model\", object}"));
  REQUIRE_NOTHROW(ddp::Checkpointer(plane, at::kCPU, {}, {a, {"other_model", b}}));
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {{"m", a}, {"m", b}}),
                    ddp::SettingsError);
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {{"a/b", a}}), ddp::SettingsError);
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {a, c}), ddp::SettingsError);
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {a, d}), ddp::SettingsError);
  REQUIRE_NOTHROW(ddp::Checkpointer(plane, at::kCPU, {}, {a, owned}));
}

TEST_CASE("an optimizer whose state cannot be kept is refused before the training") {
  TemporaryFolder folder;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  const ddp::NamedParameters parameters{{"w", torch::ones(3, torch::requires_grad())}};
  const std::vector<at::Tensor> tensors{parameters[0].tensor};
  const auto wrap = [&](std::shared_ptr<torch::optim::Optimizer> optimizer) {
    return ddp::wrap_optimizer(std::move(optimizer), parameters);
  };
  const auto lbfgs = wrap(std::make_shared<torch::optim::LBFGS>(tensors));
  const auto adam = wrap(std::make_shared<torch::optim::Adam>(tensors));
  REQUIRE_THROWS_WITH(ddp::Checkpointer(plane, at::kCPU, options_in(folder), {lbfgs}),
                      Catch::Contains("cannot be kept in a checkpoint; SGD, Adam, AdamW, RMSprop "
                                      "and Adagrad can; fix: use one of these, or leave"));
  REQUIRE_NOTHROW(ddp::Checkpointer(plane, at::kCPU, options_in(folder), {adam}));
  REQUIRE_NOTHROW(ddp::Checkpointer(plane, at::kCPU, {}, {lbfgs}));  // saves nothing
}
