// SPDX-License-Identifier: Apache-2.0
// A checkpoint with inf or NaN does not displace a finite one.
#include <torch/torch.h>

#include <array>
#include <cstdio>
#include <limits>

#include "core/files/file_ops.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/checkpoint.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

using testing::Box;
using testing::names_in;
using testing::num_found;
using testing::options_in;
using testing::read_file;
using testing::run_ranks;
using testing::stderr_of;
using testing::TemporaryFolder;
using testing::ThreadControlPlane;
using testing::ThreadJob;
using testing::write_file;

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
using Names = std::vector<std::string>;

// One rank whose model is a single weight.
struct OneRank {
  explicit OneRank(const ddp::CheckpointOptions& options)
      : model("model", {.tensors = {{"fc.weight", torch::zeros({7})}}, .values = {}}),
        checkpointer(plane, at::kCPU, options, {model}) {}

  at::Tensor& weight() { return model.state.tensors.at("fc.weight"); }
  // Saves after `step` steps; all elements except the last equal the step.
  void save(int64_t step, double last, std::optional<double> metric = std::nullopt) {
    weight().fill_(static_cast<double>(step));
    weight()[6] = last;
    checkpointer.save(step - 1, metric);
    checkpointer.wait();
  }

  ThreadJob job{1};
  ThreadControlPlane plane{job, 0};
  Box model;
  ddp::Checkpointer checkpointer;
};

}  // namespace

TEST_CASE(
    "checkpoints with inf or NaN evict no finite one, and a start restores the newest finite one") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_last = 2;
  const std::array all_bad{kInfinite, -kInfinite, std::nan("")};
  const double bad = all_bad.at(GENERATE(0, 1, 2));
  CAPTURE(bad);
  {
    OneRank run(options);
    for (const int64_t step : {10, 20, 30}) {
      run.save(step, 1.0);
    }
    const auto told = stderr_of([&] {
      for (const int64_t step : {40, 50, 60}) {
        run.save(step, bad);
      }
    });
    CHECK(num_found(told, "counts as not finite (inf or NaN in fc.weight)") == 3);
    REQUIRE(names_in(options.dir) ==
            Names{"step_0000000060", "step_0000000050", "step_0000000030", "step_0000000020"});
  }
  OneRank again(options);
  const auto told = stderr_of([&] { REQUIRE(again.checkpointer.restore() == 30); });
  CHECK(num_found(told, "contains inf or NaN: a finite checkpoint is preferred") == 2);
  CHECK(again.weight()[6].item<float>() == 1.0F);
  again.save(40, 1.0);
  REQUIRE(names_in(options.dir) ==
          Names{"step_0000000060", "step_0000000050", "step_0000000040", "step_0000000030"});
  // A finite checkpoint displaces all older ones.
  again.save(70, 1.0);
  REQUIRE(names_in(options.dir) == Names{"step_0000000070", "step_0000000060", "step_0000000040"});
  again.save(80, 1.0);
  REQUIRE(names_in(options.dir) == Names{"step_0000000080", "step_0000000070"});
}

TEST_CASE("without a finite checkpoint the newest is restored, and the newest are kept") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_last = 2;
  {
    OneRank run(options);
    for (const int64_t step : {10, 20, 30}) {
      run.save(step, -kInfinite);  // a mask, for example
    }
  }
  REQUIRE(names_in(options.dir) == Names{"step_0000000030", "step_0000000020"});
  OneRank again(options);
  REQUIRE(again.checkpointer.restore() == 30);
  CHECK(again.weight()[0].item<float>() == 30.0F);
}

TEST_CASE("an older program's checkpoint is not preferred to newer ones of a model with a mask") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_last = 5;
  {
    OneRank run(options);
    run.save(10, 1.0);
    run.save(20, -kInfinite);
  }
  const auto manifest = options.dir + "/step_0000000010/manifest.json";
  // Like an older program's, with a matching checksum; otherwise it would count as damaged.
  const auto text = read_file(manifest);
  const std::string said = " \"finite\": true,\n";
  const auto at = text.find(said);
  REQUIRE(at != std::string::npos);
  auto body = text.substr(0, text.rfind(",\n\"manifest_xxh3\""));
  body.erase(at, said.size());
  char checksum[17];
  std::snprintf(checksum, sizeof checksum, "%016llx",
                static_cast<unsigned long long>(ddp::xxh3(body)));
  write_file(manifest, ddp::concat(body, ",\n\"manifest_xxh3\": \"", checksum, "\"\n}\n"));
  OneRank again(options);
  const auto told = stderr_of([&] { REQUIRE(again.checkpointer.restore() == 20); });
  CHECK(num_found(told, "skipped the checkpoint") == 0);
}

TEST_CASE("the best checkpoint is a finite one") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_last = 1;
  options.keep_best = ddp::KeepBest::Max;
  OneRank run(options);
  run.save(10, 1.0, 0.5);
  run.save(20, 1.0, 0.4);
  run.save(30, kInfinite, 0.9);
  REQUIRE(names_in(options.dir) == Names{"step_0000000030", "step_0000000020", "step_0000000010"});
}

TEST_CASE("inf is detected in every dtype, and finite tensors pass") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong);
  TemporaryFolder folder;
  const auto options = options_in(folder);
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::ones({3})}}, .values = {}});
  Box optimizer("optimizer",
                {.tensors = {{"state.w.exp_avg", torch::zeros({5}, dtype)}}, .values = {}});
  auto& state = optimizer.state.tensors.at("state.w.exp_avg");
  // The largest numbers are finite.
  state[1] = dtype == at::kHalf       ? 65504.0
             : dtype == at::kLong     ? 1e18
             : dtype == at::kBFloat16 ? 3.3e38
             : dtype == at::kFloat    ? double{std::numeric_limits<float>::max()}
                                      : std::numeric_limits<double>::max();
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer});
  const auto save = [&](int64_t step) {
    return stderr_of([&] {
      checkpointer.save(step);
      checkpointer.wait();
    });
  };
  CHECK(num_found(save(0), "not finite") == 0);
  if (dtype == at::kLong) {
    state[4] = std::numeric_limits<int64_t>::min();
    CHECK(num_found(save(1), "not finite") == 0);
    return;
  }
  state[4] = -kInfinite;
  CHECK(num_found(save(1), "inf or NaN in optimizer.state.w.exp_avg") == 1);
}

TEST_CASE("one rank's reason makes the checkpoint of all ranks not finite") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_last = 1;
  const bool in_tensor = GENERATE(false, true);
  run_ranks(2, [&](ddp::ControlPlane& plane) {
    Box model("model", {.tensors = {{"rank_local.w", torch::zeros(3)}}, .values = {}});
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    int64_t step = 0;
    checkpointer.set_before_save([&]() -> std::string {
      return !in_tensor && step > 0 && plane.rank() == 1 ? "a rank's own reason" : "";
    });
    for (; step < 3; ++step) {
      if (in_tensor && step > 0 && plane.rank() == 1) {
        model.state.tensors.at("rank_local.w")[0] = kInfinite;
      }
      checkpointer.save(step);
      checkpointer.wait();
    }
    REQUIRE(checkpointer.last_saved_step() == 3);
  });
  REQUIRE(names_in(options.dir) == Names{"step_0000000003", "step_0000000001"});
}
