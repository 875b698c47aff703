// SPDX-License-Identifier: Apache-2.0
// Metrics of a program that names neither its model nor its loaders.
#include "ddp/train/metrics.hpp"

#include <nlohmann/json.hpp>
#include <thread>

#include "ddp/data/data_loader.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "unit/train/metrics/metrics_on.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr int kLoadMs = 20;
constexpr int kInterval = 12;  // steps

// Samples that the loop has to wait for: no workers, no batch ahead of the step.
struct SlowSamples {
  int64_t size() const { return 128; }
  Example get(int64_t /*index*/) const {
    std::this_thread::sleep_for(std::chrono::milliseconds(kLoadMs));
    return {torch::ones({4}), torch::zeros({}, torch::kLong)};
  }
};

struct Loader : DataLoader<SlowSamples> {
  Loader()
      : DataLoader(std::make_shared<SlowSamples>(), DistributedSampler(128, group()),
                   context().device(), options()) {}
  static LoaderOptions options() {
    LoaderOptions options;
    options.batch_size = 1;
    options.num_workers = 1;
    options.prefetch_batches = 1;
    return options;
  }
};

using Catch::Matchers::Contains;
using Json = nlohmann::json;

std::vector<Json> lines_of(const std::string& path) {
  std::istringstream text(testing::read_file(path));
  std::vector<Json> lines;
  for (std::string line; std::getline(text, line);) {
    lines.push_back(Json::parse(line));
  }
  return lines;
}

void take_steps(Metrics& metrics, DistributedDataParallel<Mlp>& model, Loader& loader,
                int64_t end) {
  for (int64_t step = end - kInterval; step < end; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    model.forward(batch.data).sum().backward();
    metrics.end_step(step, {.num_samples = batch.size()});
  }
}

}  // namespace

TEST_CASE("a program's models and loaders are known to its metrics") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  options.log_every = kInterval;
  Metrics metrics(context(), options);
  Mlp module;
  DistributedDataParallel model(module, group());
  Loader loader;
  metrics.begin(0, /*num_steps=*/2 * kInterval, /*steps_per_epoch=*/64);
  take_steps(metrics, model, loader, kInterval);
  {
    const Metrics::ClockPause pause(metrics);
    Loader of_evaluation;
    for (int batch = 0; batch < 60; ++batch) {  // 100 ms a step that are no part of the training
      of_evaluation.next();
    }
  }
  take_steps(metrics, model, loader, 2 * kInterval);
  if (context().is_main()) {
    const auto steps = lines_of(folder.file("run/steps.jsonl"));
    REQUIRE(steps.size() == 2);
    for (const Json& step : steps) {
      CHECK(step.at("exposed_comm_ms") >= 0);
      CHECK(step.at("loader_wait_ms") > kLoadMs / 4.0);  // a few batches are ready after a pause
      CHECK(step.at("loader_wait_ms") < 3.0 * kLoadMs);
    }
    const auto ranks = Json::parse(testing::read_file(folder.file("run/ranks.json"))).at("ranks");
    REQUIRE(ranks.size() == static_cast<size_t>(context().world_size()));
    for (const Json& rank : ranks) {
      CHECK(rank.contains("exposed_comm_ms"));
      CHECK(rank.contains("loader_wait_ms"));
    }
  }
}

TEST_CASE("models and loaders that are gone are no longer reported") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  options.log_every = 1;
  Metrics metrics(context(), options);
  {
    Mlp module;
    const DistributedDataParallel model(module, group());
    metrics.end_step(0, {.num_samples = 1});
  }
  metrics.end_step(1, {.num_samples = 1});
  if (context().is_main()) {
    const auto steps = lines_of(folder.file("run/steps.jsonl"));
    CHECK(steps.at(0).at("exposed_comm_ms") == 0);
    CHECK(!steps.at(1).contains("exposed_comm_ms"));
  }
}

TEST_CASE("waits of loaders that are gone before a logging step count") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  options.log_every = 4;
  Metrics metrics(context(), options);
  metrics.end_step(0, {.num_samples = 1});  // starts the clock
  for (int64_t step = 1; step < 4; ++step) {
    Loader().next();
    metrics.end_step(step, {.num_samples = 1});
  }
  if (context().is_main()) {
    const auto steps = lines_of(folder.file("run/steps.jsonl"));
    CHECK(steps.at(0).at("loader_wait_ms") > kLoadMs / 4.0);
  }
}

TEST_CASE("exposed communication is that of the models that still train") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  options.log_every = 1;
  Mlp module;
  DistributedDataParallel model(module, group());
  loss_of(model, 0).backward();
  Metrics metrics(context(), options);
  metrics.end_step(0, {.num_samples = 1});
  loss_of(model, 1).backward();
  metrics.end_step(1, {.num_samples = 1});
  metrics.end_step(2, {.num_samples = 1});
  if (context().is_main()) {
    const auto steps = lines_of(folder.file("run/steps.jsonl"));
    CHECK(steps.at(0).at("exposed_comm_ms") == 0);
    CHECK(steps.at(1).at("exposed_comm_ms") > 0);
    CHECK(steps.at(2).at("exposed_comm_ms") == 0);
  }
}

// With check_collectives ranks wait in a comparison of calls, which is no wait for a reduction.
TEST_CASE("a slow rank is named within fifty steps") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  options.log_every = 10;
  Metrics metrics(context(), options);
  Mlp module;
  DistributedDataParallel model(module, group());
  metrics.begin(0, /*num_steps=*/50, /*steps_per_epoch=*/0);
  for (int64_t step = 0; step < 50; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(context().rank() == 1 ? 20 : 2));
    model.zero_grad();
    model.forward(torch::ones({1, 4})).sum().backward();
    metrics.end_step(step, {.num_samples = 1});
  }
  if (context().rank() == 0) {
    const auto log = testing::read_file(metrics.folder() + "/log.txt");
    const auto ranks = Json::parse(testing::read_file(metrics.folder() + "/ranks.json"));
    INFO(ranks.dump());
    CHECK_THAT(log, !Contains("rank 0 ("));
    CHECK(!ranks.at("ranks").at(0).contains("slow_because"));
    if (context().world_size() > 1 && !checks_collectives()) {
      CHECK_THAT(log, Contains("rank 1 (") && Contains("has slowed the job down since step"));
      CHECK(ranks.at("ranks").at(1).contains("slow_because"));
    }
  }
}

TEST_CASE("run.json has the constants of a run without epochs") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  options.run.precision = "bf16";
  options.run.batch_size_per_rank = 8;
  options.run.program_version = "3.1";
  Metrics metrics(context(), options);
  const auto path = folder.file("run/run.json");
  if (context().is_main()) {
    CHECK(Json::parse(testing::read_file(path)).at("ranks") == context().world_size());
  }
  metrics.begin(0, 10, 5);
  metrics.end_step(0, {.num_samples = 8});
  if (!context().is_main()) {
    return;
  }
  const auto run = Json::parse(testing::read_file(path));
  CHECK(run.at("precision") == "bf16");
  CHECK(run.at("global_batch_size") == 8 * context().world_size());
  CHECK(run.at("batch_size_per_gpu") == 8);
  CHECK(run.at("nodes") == context().num_nodes());
  CHECK(run.at("num_steps") == 10);
  CHECK(run.at("steps_per_epoch") == 5);
  CHECK(run.at("program_version") == "3.1");
  CHECK(run.at("program").get<std::string>().find("metrics_ranks") != std::string::npos);
  CHECK(run.at("command").get<std::string>().find("metrics_ranks") != std::string::npos);
  CHECK(run.at("libddp").get<std::string>().starts_with("0."));
  CHECK(run.at("LibTorch").get<std::string>().starts_with("2."));
  CHECK(run.at("device") ==
        context().device().str().substr(0, run.at("device").get<std::string>().size()));
  CHECK(!run.at("host").get<std::string>().empty());
  CHECK(run.at("started") > 1.7e9);
}

TEST_CASE("a later start replaces run.json with its first step, not before") {
  const testing::TemporaryFolder folder;
  auto options = testing::metrics_in(folder);
  const auto path = folder.file("run/run.json");
  options.run.precision = "bf16";
  {
    Metrics metrics(context(), options);
    metrics.begin(0, 10, 5);
    metrics.end_step(0, {.num_samples = 8});
  }
  options.run.precision = "";
  context().control_plane().barrier();
  const auto first = context().is_main() ? testing::read_file(path) : "";
  {
    const Metrics metrics(context(), options);  // of a run that is complete
    context().control_plane().barrier();
    CHECK((!context().is_main() || testing::read_file(path) == first));
  }
  Metrics metrics(context(), options);
  metrics.begin(1, 10, 5);
  metrics.end_step(1, {.num_samples = 8});
  if (context().is_main()) {
    const auto run = Json::parse(testing::read_file(path));
    CHECK(run.at("started") > Json::parse(first).at("started"));
    CHECK(!run.contains("precision"));
  }
}
