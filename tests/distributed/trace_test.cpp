// SPDX-License-Identifier: Apache-2.0
// The trace of real steps: every rank has all parts of a step. On one clock, the first buckets are
// reduced while the backward still runs.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "train/trace/trace.hpp"

namespace ddp::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct Span {
  std::string name;
  double begin;
  double end;
};

// The spans of one rank and step whose name starts with `name`, by begin. On a GPU these are the
// GPU's spans, not the host's launches.
std::vector<Span> spans(const Json& events, int pid, int64_t step, const std::string& name) {
  std::vector<Span> found;
  const std::string host_track = context().device().is_cuda() ? "compute" : "";
  for (const auto& event : events) {
    if (event.at("ph") == "X" && event.at("pid") == pid && event.at("args").at("step") == step &&
        event.at("cat") != host_track && event.at("name").get<std::string>().starts_with(name)) {
      const double begin = event.at("ts").get<double>();
      found.push_back(
          {event.at("name").get<std::string>(), begin, begin + event.at("dur").get<double>()});
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  return found;
}

// Eight layers with a slow backward, in eight buckets.
torch::nn::Sequential deep_model() {
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(torch::nn::Linear(512, 512));
  }
  model->to(context().device());
  return model;
}

fs::path trace_path() {
  const auto name = context().control_plane().broadcast("ddp_trace_" + std::to_string(::getpid()));
  return fs::temp_directory_path() / (name + ".json");
}

void train(const fs::path& path, int64_t first_traced, int64_t num_steps) {
  auto module = deep_model();
  DistributedDataParallel model(module, group(), {.bucket_cap_mb = 1});
  auto optimizer = make_optimizer(model, OptimizerOptions{});
  Tracer tracer(context().control_plane(), context().device(), path.string(), first_traced, 2);
  const auto input = torch::randn({256, 512}, on_device());
  for (int64_t step = 0; step < num_steps; ++step) {
    model.zero_grad();
    model.forward(input).square().mean().backward();
    optimizer->step({.lr = 1e-3});
    tracer.end_step(step);
  }
  REQUIRE(tracer.done());
}

}  // namespace

TEST_CASE("a trace shows every part of a step on every rank") {
  const auto path = trace_path();
  train(path, 3, 6);
  context().control_plane().barrier();
  std::ifstream file(path);
  const Json events = Json::parse(file).at("traceEvents");
  for (int r = 0; r < world(); ++r) {
    for (int64_t step : {3, 4}) {
      CAPTURE(r, step);
      const auto forward = spans(events, r, step, "forward");
      const auto backward = spans(events, r, step, "backward");
      const auto optimizer = spans(events, r, step, "optimizer");
      REQUIRE(forward.size() >= 1);
      REQUIRE(backward.size() >= 1);
      REQUIRE(optimizer.size() >= 1);
      REQUIRE(forward[0].end <= backward[0].begin);
      REQUIRE(backward[0].end <= optimizer[0].begin);
      if (world() == 1) {
        continue;
      }
      const auto reductions = spans(events, r, step, "bucket ");
      REQUIRE(reductions.size() == 8);
      for (size_t i = 0; i < reductions.size(); ++i) {
        REQUIRE(reductions[i].name == "bucket " + std::to_string(i) + ": all_reduce");
        REQUIRE(reductions[i].end > reductions[i].begin);
      }
      // Overlap: the first reductions began before the backward ended, and the optimizer waited for
      // the last one.
      REQUIRE(reductions[0].begin < backward.back().end);
      if (!context().device().is_cuda()) {  // a GPU may finish such a small model's backward first
        REQUIRE(reductions[3].begin < backward.back().end);
      }
      REQUIRE(reductions.back().end <= optimizer.back().end);
    }
    REQUIRE(spans(events, r, 2, "").empty());
    REQUIRE(spans(events, r, 5, "").empty());
  }
  context().control_plane().barrier();
  if (rank() == 0) {
    fs::remove(path);
  }
}

}  // namespace ddp::test
