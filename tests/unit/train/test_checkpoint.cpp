// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "ddp/train/checkpoint.hpp"
#include "ddp/train/safetensors.hpp"
#include "support/catch.hpp"
#include "train/checkpoint_impl.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::CheckpointOptions;
using ddp::StateDict;
using ddp::detail::CheckpointerImpl;
using testing::run_ranks;
using testing::TemporaryFolder;
using testing::ThreadControlPlane;
using testing::ThreadJob;

// An object that keeps exactly what it is given.
struct Box : ddp::Stateful {
  Box(std::string name_in, StateDict state_in)
      : name(std::move(name_in)), state(std::move(state_in)) {}
  std::string state_name() const override { return name; }
  StateDict state_dict() const override { return state; }
  void load_state_dict(const StateDict& loaded) override {
    for (const auto& [key, tensor] : state.tensors) {
      const auto found = loaded.tensors.find(key);
      if (found == loaded.tensors.end()) {
        throw ddp::MismatchError("missing key " + key);
      }
      if (found->second.sizes() != tensor.sizes() ||
          found->second.scalar_type() != tensor.scalar_type()) {
        throw ddp::MismatchError("other shape or dtype of " + key);
      }
    }
    for (const auto& [key, tensor] : loaded.tensors) {
      if (state.tensors.count(key) == 0) {
        throw ddp::MismatchError("unexpected key " + key);
      }
    }
    for (auto& [key, tensor] : state.tensors) {
      tensor.copy_(loaded.tensors.at(key));
    }
    state.values = loaded.values;
  }
  std::string name;
  StateDict state;
};

// A small training run with dropout, momentum and a loader position: every kind of state there is.
struct Run {
  Run() : Run(at::TensorOptions()) {}
  explicit Run(at::TensorOptions options) {
    torch::manual_seed(7);
    weight = torch::randn({4, 6}).to(options);
    momentum = torch::zeros({4, 6}, at::kFloat);
  }
  void step() {
    const auto input = torch::randn({8, 6});
    const auto output = torch::dropout(input.matmul(weight.to(at::kFloat).t()), 0.3, true);
    momentum.mul_(0.9).add_(output.t().matmul(input), 0.01);
    weight.sub_((0.1 * momentum).to(weight.scalar_type()));
    position += 8;
    losses.push_back(output.sum().item<double>());
  }
  Box model() { return {"model", {.tensors = {{"fc.weight", weight}}, .values = {}}}; }
  Box optimizer() {
    return {"optimizer",
            {.tensors = {{"state.fc.weight.momentum_buffer", momentum}}, .values = {}}};
  }
  at::Tensor weight, momentum;
  int64_t position = 0;
  std::vector<double> losses;
};

struct Loader : ddp::Stateful {
  explicit Loader(int64_t& position_in) : position(position_in) {}
  std::string state_name() const override { return "loader"; }
  StateDict state_dict() const override {
    return {.tensors = {}, .values = {{"position", position}}};
  }
  void load_state_dict(const StateDict& state) override {
    position = std::get<int64_t>(state.values.at("position"));
  }
  int64_t& position;
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

CheckpointOptions options_in(const TemporaryFolder& folder) {
  CheckpointOptions options;
  options.dir = folder.file("ckpt");
  return options;
}

std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& folder : ddp::detail::list_checkpoints(dir)) {
    names.push_back(folder.name);
  }
  return names;
}

template <typename E>
std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const E& expected) {
    return expected.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a resumed run gives the undisturbed run's bits") {
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
    first.step();  // lost with the process; must not reach the checkpoint
  }
  {
    Run second(dtype);
    second.weight.zero_();
    torch::rand(17);  // another place in the generator
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

TEST_CASE("files carry the names other programs know") {
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

TEST_CASE("the fp32 master of a bf16 leaf is what model.safetensors holds") {
  TemporaryFolder folder;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  const auto options = options_in(folder);
  const auto master = torch::randn({3, 2});
  const auto make = [](const at::Tensor& leaf, const at::Tensor& held) {
    return std::pair(
        Box("model", {.tensors = {{"w", leaf}, {"b", torch::ones(2)}}, .values = {}}),
        Box("optimizer", {.tensors = {{"state.w.master", held}, {"state.w.exp_avg", held + 1}},
                          .values = {{"step", int64_t{3}}}}));
  };
  {
    auto [model, optimizer] = make(master.to(at::kBFloat16), master);
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer});
    checkpointer.save(4);
  }
  const auto dir = options.dir + "/step_0000000005/";
  REQUIRE(same_bits(ddp::load_safetensors(dir + "model.safetensors").tensors.at("w"), master));
  REQUIRE(ddp::load_safetensors(dir + "optimizer.safetensors").tensors.size() == 1);
  auto [model, optimizer] = make(torch::zeros({3, 2}, at::kBFloat16), torch::zeros({3, 2}));
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer});
  REQUIRE(checkpointer.restore() == 5);
  REQUIRE(same_bits(model.state.tensors.at("w"), master.to(at::kBFloat16)));
  REQUIRE(same_bits(optimizer.state.tensors.at("state.w.master"), master));
  REQUIRE(std::get<int64_t>(optimizer.state.values.at("step")) == 3);
}

TEST_CASE("a damaged newest checkpoint on one rank alone makes all ranks fall back together") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = GENERATE(false, true);
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
    // What only one rank knows comes back to that rank.
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
    if (plane.rank() == 0) {  // damages what rank 1 alone reads
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
    // What is saved next is newer than the damaged one only once its step is reached.
    checkpointer.save(2);
    checkpointer.wait();
    REQUIRE(checkpointer.last_saved_step() == 3);
  });
  REQUIRE(message_of<std::exception>(errors[0]) == "");
  REQUIRE(message_of<std::exception>(errors[1]) == "");
  REQUIRE(names_in(options.dir).front() == "step_0000000003.1");
}

TEST_CASE("where no checkpoint is whole, restore says so and never starts at step 0") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.save(0);
  }
  const auto path = options.dir + "/step_0000000001/model.safetensors";
  const auto good = testing::read_file(path);
  const auto restore = [&](const std::string& resume, Box& object) {
    auto changed = options;
    changed.resume = resume;
    ddp::Checkpointer checkpointer(plane, at::kCPU, changed, {object});
    return checkpointer.restore();
  };
  testing::write_file(path, good.substr(0, good.size() - 1));
  REQUIRE_THROWS_AS(restore("auto", model), ddp::ReadError);
  testing::write_file(path, good);
  REQUIRE(restore("auto", model) == 1);
  REQUIRE_THROWS_AS(restore("never", model), ddp::SettingsError);

  Box other("model", {.tensors = {{"v", torch::zeros(3)}}, .values = {}});
  REQUIRE_THROWS_AS(restore("auto", other), ddp::MismatchError);
  Box unknown("ema", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
  REQUIRE_THROWS_AS(restore("auto", unknown), ddp::MismatchError);

  // A newer format is an error even though an older checkpoint would load.
  auto& ops = ddp::detail::system_file_ops();
  ddp::detail::commit_save(ops, options.dir, ddp::detail::begin_save(ops, options.dir, 5),
                           {.format = ddp::detail::kCheckpointFormat + 1, .step = 5});
  REQUIRE_THROWS_WITH(restore("auto", model), Catch::Contains("use a newer libddp"));

  std::filesystem::remove_all(options.dir);
  REQUIRE(restore("auto", model) == 0);
  REQUIRE_THROWS_AS(restore("require", model), ddp::ReadError);
}

namespace {

// A disk that is full while `full`.
struct FullDisk : ddp::detail::FileOps {
  std::atomic<bool> full = false;
  ssize_t write(int fd, const void* data, std::size_t size) override {
    if (full) {
      errno = ENOSPC;
      return -1;
    }
    return FileOps::write(fd, data, size);
  }
};

}  // namespace

TEST_CASE("a full disk on one rank fails the save on all, training goes on, then 73") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.max_failures = 2;
  FullDisk disks[2];
  const int victim = GENERATE(0, 1);
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    Box model("model", {.tensors = {{"w", torch::arange(1000)}}, .values = {}});
    CheckpointerImpl checkpointer(plane, at::kCPU, options, {model}, disks[plane.rank()]);
    checkpointer.save(0, {});
    checkpointer.wait();
    plane.barrier();
    disks[victim].full = true;
    plane.barrier();
    checkpointer.save(1, {});
    checkpointer.wait();  // failure 1
    REQUIRE(checkpointer.last_saved_step() == 1);
    plane.barrier();
    disks[victim].full = false;
    plane.barrier();
    checkpointer.save(2, {});
    checkpointer.wait();  // works again: the count starts anew
    REQUIRE(checkpointer.last_saved_step() == 3);
    plane.barrier();
    disks[victim].full = true;
    plane.barrier();
    checkpointer.save(3, {});
    checkpointer.wait();  // failure 1
    checkpointer.save(4, {});
    checkpointer.wait();  // failure 2: throws on all ranks
  });
  for (const auto& error : errors) {
    REQUIRE_THAT(message_of<ddp::WriteError>(error),
                 Catch::Contains("No space left") && Catch::Contains("failure 2 of at most 2"));
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000003", "step_0000000001"});
  REQUIRE(std::distance(std::filesystem::directory_iterator(options.dir), {}) == 2);
}

TEST_CASE("one rank asked to stop: all save after the same step and leave with 75") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.stop_check_seconds = 0.05;
  std::array<int64_t, 3> last_step{-1, -1, -1};
  const auto errors = run_ranks(3, [&](ddp::ControlPlane& plane) {
    Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    int64_t step = 0;
    checkpointer.set_stop_check([&] { return plane.rank() == 2 && step >= 40; });
    for (step = checkpointer.restore(); step < 5000; ++step) {
      last_step[plane.rank()] = step;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      checkpointer.save_if_due(step);
    }
  });
  for (const auto& error : errors) {
    REQUIRE_THAT(message_of<ddp::Stop>(error), Catch::Contains("rank 2 was asked to stop"));
  }
  REQUIRE(last_step[0] >= 40);
  REQUIRE(last_step[0] < 1000);
  REQUIRE(last_step == std::array{last_step[0], last_step[0], last_step[0]});
  REQUIRE(ddp::detail::list_checkpoints(options.dir).front().step == last_step[0] + 1);
}

TEST_CASE("a stop without a folder for checkpoints does not claim to have saved") {
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
  ddp::Checkpointer checkpointer(plane, at::kCPU, {}, {model});
  checkpointer.set_stop_check([] { return true; });
  REQUIRE(checkpointer.restore() == 0);
  try {
    checkpointer.save_if_due(0);
    FAIL("no exception");
  } catch (const ddp::Error& error) {
    REQUIRE(error.exit_code() == ddp::ExitCode::UserException);
  }
}

TEST_CASE("saves are due by steps, and the ranks talk seldom") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.every_steps = 40;
  options.keep_last = 2;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    for (auto step = checkpointer.restore(); step < 200; ++step) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      checkpointer.save_if_due(step);
    }
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000200", "step_0000000160"});
  REQUIRE(job.num_gathers < 40);
}

TEST_CASE("an exception in training leaves no unfinished checkpoint that counts") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros(1 << 20)}}, .values = {}});
  try {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.save(0);
    throw std::runtime_error("user's");
  } catch (const std::runtime_error&) {
  }
  REQUIRE(names_in(options.dir).empty());
  ddp::Checkpointer again(plane, at::kCPU, options, {model});
  REQUIRE(again.restore() == 0);
  REQUIRE(std::distance(std::filesystem::directory_iterator(options.dir), {}) == 0);
}

TEST_CASE("objects need names of their own") {
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box a("model", {}), b("model", {}), c("rank_0", {}), d("a/b", {});
  auto owned = std::make_unique<Box>("owned", StateDict{});
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {a, b}), ddp::SettingsError);
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {a, c}), ddp::SettingsError);
  REQUIRE_THROWS_AS(ddp::Checkpointer(plane, at::kCPU, {}, {a, d}), ddp::SettingsError);
  REQUIRE_NOTHROW(ddp::Checkpointer(plane, at::kCPU, {}, {a, owned}));
}
