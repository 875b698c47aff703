// SPDX-License-Identifier: Apache-2.0
// Metrics that a program names itself, from the calls to the rows.
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "ddp/core/error.hpp"
#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "train/graph/step_ring.hpp"
#include "unit/train/metrics/metrics_on.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::MetricReduction;
using testing::metrics_in;
using testing::rethrow;
using testing::run_ranks;
using testing::TemporaryFolder;

std::vector<nlohmann::json> rows_of(const std::string& path) {
  std::istringstream in(testing::read_file(path));
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(in, line);) {
    rows.push_back(nlohmann::json::parse(line));
  }
  return rows;
}

/// A value in each of the ways in which a step may have it.
ddp::MetricValue as(int way, double value) {
  if (way == 0) {
    return value;
  }
  const auto tensor = torch::tensor(static_cast<float>(value)).requires_grad_();
  return way == 1 ? ddp::MetricValue(tensor * 1) : ddp::detail::StepRing::log_now({tensor})[0];
}

}  // namespace

TEST_CASE("custom metrics of an interval are reduced over its steps and all ranks") {
  const int way = GENERATE(0, 1, 2);
  CAPTURE(way);
  TemporaryFolder folder;
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 4; ++step) {
      const double value = step + 10.0 * plane.rank();
      metrics.log("d_loss", as(way, value), {.weight = 1.0 + plane.rank()});
      metrics.log("seen", as(way, value), {.reduction = MetricReduction::Sum});
      metrics.log("least", as(way, value), {.reduction = MetricReduction::Min});
      metrics.log("most", as(way, value), {.reduction = MetricReduction::Max});
      metrics.log("pairs", as(way, 100), {.reduction = MetricReduction::Rate});
      metrics.end_step(step, {.num_samples = 1});
    }
  }));
  const auto rows = rows_of(folder.file("run/steps.jsonl"));
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].at("d_loss") == (0 + 1 + 2 * (10 + 11)) / 6.0);
  CHECK(rows[1].at("d_loss") == (2 + 3 + 2 * (12 + 13)) / 6.0);
  CHECK(rows[1].at("seen") == 2 + 3 + 12 + 13);
  CHECK(rows[1].at("least") == 2);
  CHECK(rows[1].at("most") == 13);
  // The first step of a run is not timed: the first interval counts one step, the second two.
  const auto pairs = [&](int row) {
    return rows[row].at("pairs_per_second").get<double>() *
           rows[row].at("interval_seconds").get<double>();
  };
  CHECK(pairs(0) == Approx(200));
  CHECK(pairs(1) == Approx(400));
  const auto csv = testing::read_file(folder.file("run/steps.csv"));
  CHECK_THAT(csv.substr(0, csv.find('\n')),
             Catch::EndsWith(",d_loss,seen,least,most,pairs_per_second,time"));
}

// An epoch's end leaves the interval of the log line open: every step is in one row.
TEST_CASE("loss and custom metrics of a line cover the same steps over an epoch's end") {
  TemporaryFolder folder;
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 6; ++step) {
      metrics.log("mse", 1.0 + step);
      metrics.log("seen", 1, {.reduction = MetricReduction::Sum});
      metrics.log("tokens", 100, {.reduction = MetricReduction::Rate});
      metrics.end_step(step, {.loss = 1.0 + step, .num_samples = 1});
      if (step % 3 == 2) {
        metrics.end_epoch(step / 3);
      }
    }
  }));
  const auto rows = rows_of(folder.file("run/steps.jsonl"));
  REQUIRE(rows.size() == 3);
  for (int row = 0; row < 3; ++row) {
    CAPTURE(row);
    CHECK(rows[row].at("loss") == 1.5 + 2 * row);
    CHECK(rows[row].at("mse") == 1.5 + 2 * row);
    CHECK(rows[row].at("seen") == 4);
    // The first step of a run is not timed.
    CHECK(rows[row].at("tokens_per_second").get<double>() *
              rows[row].at("interval_seconds").get<double>() ==
          Approx(row == 0 ? 200 : 400));
  }
  const auto epochs = rows_of(folder.file("run/epochs.jsonl"));
  CHECK(epochs.at(0).at("train_loss") == 2);
  CHECK(epochs.at(1).at("train_loss") == 5);
}

TEST_CASE("a tensor may be overwritten after the call, as a replayed graph does") {
  TemporaryFolder folder;
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    const auto value = torch::zeros({1});
    for (int step = 0; step < 2; ++step) {
      value.fill_(step);
      metrics.log("mean", value);
      metrics.log("least", value, {.reduction = MetricReduction::Min});
      metrics.end_step(step, {.num_samples = 1});
    }
  }));
  const auto rows = rows_of(folder.file("run/steps.jsonl"));
  CHECK(rows.at(0).at("mean") == 0.5);
  CHECK(rows.at(0).at("least") == 0);
}

TEST_CASE("an epoch's custom metrics are in its row, and in its result on all ranks") {
  TemporaryFolder folder;
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int epoch = 0; epoch < 2; ++epoch) {
      const double samples = plane.rank() == 0 ? 3 : 1;
      metrics.log_epoch("accuracy@5", 0.5 * plane.rank() + epoch, {.weight = samples});
      const auto result = metrics.end_epoch(epoch);
      REQUIRE(result.custom.at("accuracy@5") == 0.125 + epoch);
    }
  }));
  const auto rows = rows_of(folder.file("run/epochs.jsonl"));
  REQUIRE(rows.size() == 2);
  CHECK(rows[1].at("accuracy@5") == 1.125);
}

TEST_CASE("test_loss and test_accuracy of an epoch fill their own columns") {
  TemporaryFolder folder;
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    metrics.log_epoch("test_loss", 1.0 + plane.rank());
    metrics.log_epoch("test_accuracy", 0.5);
    REQUIRE(metrics.end_epoch(0, {.test_accuracy = 0.75}).custom.at("test_loss") == 1.5);
  }));
  const auto row = rows_of(folder.file("run/epochs.jsonl")).at(0);
  CHECK(row.at("test_loss") == 1.5);
  CHECK(row.at("test_accuracy") == 0.5);
  const auto csv = testing::read_file(folder.file("run/epochs.csv"));
  CHECK(csv.find("test_loss") == csv.rfind("test_loss"));
}

TEST_CASE("a metric that a rank lacks ends the logging step with its name") {
  TemporaryFolder folder;
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 2; ++step) {
      if (plane.rank() == 0) {
        metrics.log("fid", 1.0);
      }
      metrics.end_step(step, {.num_samples = 1});
    }
  });
  CHECK_THROWS_WITH(rethrow(errors),
                    Catch::Contains("metric \"fid\" was logged on rank 0 but not on rank 1"));
}

TEST_CASE("custom metrics that cannot be used are refused") {
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, {});
    CHECK_THROWS_AS(metrics.log("", 1.0), ddp::SettingsError);
    CHECK_THROWS_WITH(metrics.log("a", torch::zeros({2})), Catch::Contains("has 2 elements"));
    CHECK_THROWS_WITH(metrics.log("a", 1.0, {.weight = -1}), Catch::Contains("is -1"));
    CHECK_THROWS_WITH(metrics.log_epoch("c", 1.0, {.reduction = MetricReduction::Rate}),
                      Catch::Contains("cannot be a rate"));
    CHECK_THROWS_AS(metrics.add_writer(nullptr), ddp::SettingsError);
    metrics.log("b", 1.0);
    CHECK_THROWS_WITH(metrics.log("b", 1.0, {.reduction = MetricReduction::Sum}),
                      Catch::Contains("another reduction"));
  }));
}

TEST_CASE("the name of a column that exists is refused when it is logged, on every rank") {
  for (const auto& error : run_ranks(2, [&](ddp::ControlPlane& plane) {
         ddp::MetricsOptions options;
         options.dir = "";
         options.run.sample_unit = "tokens";
         auto metrics = testing::metrics_on(plane, options);
         CHECK_THROWS_WITH(metrics.log("loss", 1.0),
                           Catch::Contains("metric \"loss\" would have libddp's column loss; fix: "
                                           "choose another name than step, epoch, loss, accuracy"));
         const ddp::LogOptions rate{.reduction = MetricReduction::Rate};
         CHECK_THROWS_WITH(metrics.log("tokens", 1.0, rate),
                           Catch::Contains("libddp's column tokens_per_second"));
         CHECK_THROWS_WITH(metrics.log_epoch("train_loss", 1.0), Catch::Contains("train_loss"));
         CHECK_NOTHROW(metrics.log("train_loss", 1.0));  // a column of epochs only
         CHECK_NOTHROW(metrics.log_epoch("test_loss", 1.0));
         metrics.log("pairs", 1.0, rate);
         CHECK_THROWS_WITH(metrics.log("pairs_per_second", 1.0),
                           Catch::Contains("\"pairs\" and \"pairs_per_second\" would have one "
                                           "column pairs_per_second"));
       })) {
    CHECK_FALSE(error);
  }
}

TEST_CASE("a value of weight 0 counts in no reduction") {
  TemporaryFolder folder;
  const auto reduction = GENERATE(MetricReduction::Mean, MetricReduction::Sum, MetricReduction::Min,
                                  MetricReduction::Max);
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 2; ++step) {
      const bool has_value = plane.rank() == 0 && step == 1;
      metrics.log("m", torch::tensor(has_value ? 5.0 : NAN),
                  {.reduction = reduction, .weight = has_value ? 1.0 : 0.0});
      metrics.end_step(step, {.num_samples = 1});
    }
  }));
  CHECK(rows_of(folder.file("run/steps.jsonl")).at(0).at("m") == 5);
}

TEST_CASE("a rank that stops logging a metric is named") {
  TemporaryFolder folder;
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 4; ++step) {
      if (plane.rank() == 0 || step < 2) {
        metrics.log("fid", 1.0);
      }
      metrics.end_step(step, {.num_samples = 1});
    }
  });
  CHECK_THROWS_WITH(rethrow(errors),
                    Catch::Contains("metric \"fid\" was logged on rank 0 but not on rank 1"));
  CHECK(rows_of(folder.file("run/steps.jsonl")).size() == 1);
}

TEST_CASE("an evaluation between epochs may have custom metrics") {
  TemporaryFolder folder;
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    metrics.add_evaluation(1, {.test_loss = 2, .custom = {{"perplexity", 7.5}}});
  }));
  CHECK(rows_of(folder.file("run/evals.jsonl")).at(0).at("perplexity") == 7.5);
}

TEST_CASE("the loss and the accuracy count targets, in whichever way each step gives them") {
  const int first = GENERATE(0, 1, 2);
  const int second = GENERATE(0, 1, 2);
  CAPTURE(first, second);
  TemporaryFolder folder;
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    metrics.end_step(0, {.loss = as(first, 2), .num_samples = 4});
    metrics.end_step(1, {.loss = as(second, 5),
                         .num_samples = 4,
                         .grad_norm = as(first, 7),
                         .num_correct = as(second, 3),
                         .num_targets = 10});
    const auto epoch = metrics.end_epoch(0);
    CHECK(epoch.train_loss == (4 * 2 + 10 * 5) / 14.0);
    CHECK(epoch.train_accuracy == 0.3);
  }));
  const auto row = rows_of(folder.file("run/steps.jsonl")).at(0);
  CHECK(row.at("loss") == (4 * 2 + 10 * 5) / 14.0);
  CHECK(row.at("accuracy") == 0.3);
  CHECK(row.at("grad_norm") == 7);
}

TEST_CASE("a writer gets the settings and all rows, on rank 0") {
  struct Recorder : ddp::MetricsWriter {
    std::string folder, settings;
    std::vector<std::string> tables;
    void begin(const std::string& path, const std::string& text) override {
      folder = path;
      settings = text;
    }
    void write(const std::string& table, const ddp::MetricsRow& row) override {
      REQUIRE_FALSE(row.empty());
      tables.push_back(table);
    }
  };
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.csv = options.jsonl = false;
  options.run.settings_text = "a: 1\n";
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    const auto recorder = std::make_shared<Recorder>();
    auto metrics = testing::metrics_on(plane, options);
    metrics.add_writer(recorder);
    metrics.end_step(0, {.num_samples = 1});
    metrics.end_step(1, {.num_samples = 1});
    metrics.add_evaluation(1, {.test_loss = 1});
    metrics.end_epoch(0);
    const bool is_main = plane.rank() == 0;
    CHECK(recorder->folder == (is_main ? folder.file("run") : ""));
    CHECK(recorder->settings == (is_main ? "a: 1\n" : ""));
    CHECK(recorder->tables == (is_main ? std::vector<std::string>{"steps", "evals", "epochs"}
                                       : std::vector<std::string>{}));
  }));
}

namespace {

// A ring of a GraphedStep's numbers, in which this thread plays the device.
std::shared_ptr<ddp::detail::StepRing> make_ring() {
  using namespace ddp::detail;
  auto* slots = new PublishedSlot[StepRing::kNumSlots]();
  return std::make_shared<StepRing>(
      StepRing::Slots(slots, [](PublishedSlot* made) { delete[] made; }), [] {});
}

void finish_step(ddp::detail::StepRing& ring, uint64_t sequence, double value) {
  auto& slot = ring.slots()[sequence % ddp::detail::StepRing::kNumSlots];
  slot.values[0] = value;
  std::atomic_ref<uint64_t>(slot.sequence).store(sequence, std::memory_order_release);
}

}  // namespace

TEST_CASE("a number that few steps log is read before its memory is reused") {
  const bool logs_others = GENERATE(false, true);  // and else ends steps
  TemporaryFolder folder;
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto options = metrics_in(folder);
    options.log_every = 400;
    auto metrics = testing::metrics_on(plane, options);
    const auto ring = make_ring();
    for (uint64_t step = 1; step <= 400; ++step) {
      ring->begin(step);
      if (step == 1) {
        metrics.log("fid", ring->log(step, 1)[0]);
        metrics.log_epoch("test_fid", ring->log(step, 1)[0]);
      }
      finish_step(*ring, step, step == 1 ? 7 : 0);
      if (logs_others) {
        metrics.log("other", 1.0);
        metrics.log_epoch("test_other", 1.0);
      } else {
        metrics.end_step(static_cast<int64_t>(step) - 1, {.num_samples = 1});
      }
    }
    if (logs_others) {
      metrics.end_step(399, {.num_samples = 1});
    }
    CHECK(metrics.end_epoch(0).custom.at("test_fid") == 7);
  }));
  CHECK(rows_of(folder.file("run/steps.jsonl")).at(0).at("fid") == 7);
}
