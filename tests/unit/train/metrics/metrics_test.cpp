// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "core/control/wire/message_codec.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "train/graph/step_ring.hpp"
#include "unit/train/metrics/metrics_on.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::MetricsOptions;
using testing::metrics_in;
using testing::read_csv;
using testing::rethrow;
using testing::run_ranks;
using testing::TemporaryFolder;

// The interface that Metrics::observe uses of a model and a loader.
struct Model {
  double exposed_communication_ms() { return 1.5; }
};
struct TimedLoader {
  double total = 0;
  double wait_ms() const { return total; }
};

using Rows = std::vector<std::map<std::string, std::string>>;

// Six steps of 20 ms on one of two ranks. Rank 0: 8 samples, loss = step; rank 1: 4 samples, loss =
// step + 3.
ddp::EpochResult take_six_steps(ddp::Metrics& metrics, int rank, TimedLoader& loader) {
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < 6; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    loader.total += 2;
    const auto loss = torch::full({}, step + 3.0 * rank, at::kFloat).requires_grad_();
    metrics.end_step(step, {.loss = loss * 1,
                            .num_samples = rank == 0 ? 8 : 4,
                            .lr = 0.1,
                            .grad_norm = torch::tensor(2.0),
                            .num_correct = torch::tensor(rank == 0 ? 6 : 3)});
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  {
    ddp::Metrics::ClockPause pause(metrics);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  const auto epoch = metrics.end_epoch(1, {.test_loss = 0.25, .test_accuracy = 0.5});
  // Five steps of 20 ms after one warm-up step; the pause of 300 ms does not count.
  REQUIRE(epoch.seconds >= 0.1);
  REQUIRE(epoch.seconds < elapsed.count() + 0.2);
  return epoch;
}

void check_steps(const Rows& rows) {
  REQUIRE(rows.size() == 3);
  REQUIRE(rows[0].at("step") == "2");
  REQUIRE(rows[0].at("epoch") == "0.5");
  // Steps 2 and 3: (8 (2 + 3) + 4 (5 + 6)) / 24.
  REQUIRE(std::stod(rows[1].at("loss")) == (8.0 * 5 + 4.0 * 11) / 24);
  REQUIRE(std::stod(rows[1].at("accuracy")) == 0.75);
  REQUIRE(std::stod(rows[1].at("grad_norm")) == 2);
  REQUIRE(std::stod(rows[1].at("exposed_comm_ms")) == 1.5);
  REQUIRE(std::stod(rows[1].at("loader_wait_ms")) == 2);
  const double step_ms = std::stod(rows[1].at("step_ms"));
  REQUIRE(step_ms >= 20);
  // Covers the interval's two steps; the first interval has one timed step and one warm-up step.
  REQUIRE(std::stod(rows[1].at("interval_seconds")) == Approx(2 * step_ms / 1000));
  REQUIRE(std::stod(rows[0].at("interval_seconds")) ==
          Approx(std::stod(rows[0].at("step_ms")) / 1000));
  const double rate = std::stod(rows[1].at("samples_per_second"));
  REQUIRE(rate == Approx(12 * 1000 / step_ms));
  REQUIRE(std::stod(rows[1].at("samples_per_second_per_rank")) == rate / 2);
  REQUIRE(rows[1].at("energy_j") == "");  // no GPU, no energy: not 0
}

// Checks that the JSON lines agree with the CSV file.
void check_jsonl(const std::string& path, const Rows& rows) {
  std::istringstream jsonl(testing::read_file(path));
  for (const auto& row : rows) {
    std::string line;
    std::getline(jsonl, line);
    const auto json = nlohmann::json::parse(line);
    for (const auto& [name, text] : row) {
      REQUIRE(text == (json.contains(name) ? text : ""));
      if (json.contains(name)) {
        REQUIRE(json.at(name).get<double>() == std::stod(text));
      }
    }
  }
}

void check_epochs(const Rows& epochs, const ddp::EpochResult& result) {
  REQUIRE(epochs.size() == 1);
  const auto& epoch = epochs[0];
  std::istringstream columns(
      "job_id commit gpu_type nodes gpus precision global_batch_size batch_size_per_gpu "
      "bucket_cap_mb epoch train_loss train_accuracy test_loss test_accuracy epoch_seconds "
      "samples_per_second gpu_utilisation_percent power_w memory_gib ranks repeat steps_per_epoch "
      "epoch_steps energy_j");
  for (std::string column; columns >> column;) {
    INFO(column);
    REQUIRE(epoch.count(column) == 1);
  }
  REQUIRE(epoch.at("job_id") == "77");
  REQUIRE(epoch.at("global_batch_size") == "16");
  REQUIRE(std::stod(epoch.at("train_loss")) == (8.0 * 15 + 4.0 * (15 + 18)) / 72);
  REQUIRE(epoch.at("test_accuracy") == "0.5");
  REQUIRE(epoch.at("power_w") == "");
  REQUIRE(epoch.at("energy_j") == "");
  REQUIRE(epoch.at("repeat") == "3");
  REQUIRE(epoch.at("steps_per_epoch") == "4");
  REQUIRE(epoch.at("epoch_steps") == "6");
  REQUIRE(result.train_loss == std::stod(epoch.at("train_loss")));
}

}  // namespace

TEST_CASE("losses and rates of all ranks are weighted by samples and counted once") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.run = {.precision = "fp32",
                 .batch_size_per_rank = 8,
                 .bucket_cap_mb = 25,
                 .settings_text = "a: 1\n"};
  options.repeat = 3;
  ddp::EpochResult result;
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    const int rank = plane.rank();
    ddp::LaunchEnvironment launch;
    launch.job_id = "77";
    auto metrics = testing::metrics_on(plane, options, launch);
    Model model;
    TimedLoader loader;
    metrics.observe(model);
    metrics.observe(loader);
    metrics.begin(0, /*num_steps=*/6, /*steps_per_epoch=*/4);
    const auto epoch = take_six_steps(metrics, rank, loader);
    if (rank == 0) {
      result = epoch;
    }
    REQUIRE(metrics.folder() == (rank == 0 ? folder.file("run") : ""));
  }));

  const auto rows = read_csv(folder.file("run/steps.csv"));
  check_steps(rows);
  check_jsonl(folder.file("run/steps.jsonl"), rows);
  check_epochs(read_csv(folder.file("run/epochs.csv")), result);
  REQUIRE(testing::read_file(folder.file("run/settings.txt")) == "a: 1\n");
}

TEST_CASE("FLOPs of the second step give rates and shares of the peak") {
  const bool is_given = GENERATE(false, true);
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.run.peak_tflops = 1e-6;
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    if (is_given) {
      metrics.set_flops_per_sample(600);
    }
    const auto product = [](int64_t n) { torch::mm(torch::ones({n, 3}), torch::ones({3, 4})); };
    for (int step = 0; step < 6; ++step) {
      product(step == 1 ? 10 : 1);  // 240 FLOP for 8 samples
      {
        const ddp::Metrics::ClockPause pause(metrics);
        product(1000);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      metrics.end_step(step, {.num_samples = 8});
    }
    metrics.end_epoch(0);
    REQUIRE_THROWS_AS(metrics.set_flops_per_sample(0), ddp::SettingsError);
  }));
  const double flops = is_given ? 600 : 30;
  const auto run = nlohmann::json::parse(testing::read_file(folder.file("run/run.json")));
  CHECK(run.at("flops_per_sample") == flops);
  CHECK(run.at("peak_tflops") == 1e-6);
  const auto rows = read_csv(folder.file("run/steps.csv"));
  for (const auto& row : rows) {
    const double rate = std::stod(row.at("samples_per_second_per_rank"));
    CHECK(std::stod(row.at("tflops_per_rank")) == Approx(1e-12 * rate * flops));
    CHECK(std::stod(row.at("mfu")) == Approx(1e-6 * rate * flops));
  }
  CHECK(std::stod(read_csv(folder.file("run/epochs.csv")).at(0).at("mfu")) > 0);
}

TEST_CASE("FLOPs that a program gives after the second step are in run.json") {
  TemporaryFolder folder;
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 3; ++step) {
      metrics.end_step(step, {.num_samples = 8});
    }
    metrics.set_flops_per_sample(700);
  }));
  const auto run = nlohmann::json::parse(testing::read_file(folder.file("run/run.json")));
  CHECK(run.at("flops_per_sample") == 700);
}

TEST_CASE("begin() gives a loop over epochs its total and the epoch of each line") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.progress = ddp::ProgressStyle::Plain;
  const auto log = testing::stderr_of([&] {
    rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
      auto metrics = testing::metrics_on(plane, options);
      metrics.begin(0, /*num_steps=*/8, /*steps_per_epoch=*/4);
      for (int step = 0; step < 4; ++step) {
        metrics.end_step(step, {.num_samples = 1});
      }
      metrics.end_epoch(0);
    }));
  });
  CHECK(testing::num_found(log, "step 2/8 | epoch 0.50 | ") == 1);
  CHECK(testing::num_found(log, "ETA ") == 2);
  CHECK(read_csv(folder.file("run/epochs.csv")).at(0).at("steps_per_epoch") == "4");
}

TEST_CASE("the run folder has the log and each rank's numbers of the last step") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.progress = ddp::ProgressStyle::Plain;
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    Model model;
    metrics.observe(model);
    metrics.begin(0, /*num_steps=*/4);
    for (int step = 0; step < 4; ++step) {
      metrics.end_step(step, {.num_samples = plane.rank() + 1});
    }
  }));
  const auto record = nlohmann::json::parse(testing::read_file(folder.file("run/ranks.json")));
  REQUIRE(record.at("step") == 4);
  REQUIRE(record.at("max_steps") == 4);
  const auto& ranks = record.at("ranks");
  REQUIRE(ranks.size() == 2);
  for (int rank = 0; rank < 2; ++rank) {
    INFO(rank);
    REQUIRE(ranks[rank].at("rank") == rank);
    REQUIRE(ranks[rank].at("device") == "cpu");
    REQUIRE(!ranks[rank].at("host").get<std::string>().empty());
    REQUIRE(ranks[rank].at("exposed_comm_ms") == 1.5);
    const auto seconds = ranks[rank].at("step_ms").get<double>() / 1000;
    REQUIRE(ranks[rank].at("samples_per_second").get<double>() == Approx((rank + 1) / seconds));
    REQUIRE(!ranks[rank].contains("power_w"));
  }
  REQUIRE(testing::num_found(testing::read_file(folder.file("run/log.txt")), "step 4/4") == 1);
}

TEST_CASE("a step's loss may be overwritten after the call, as a replayed graph does") {
  TemporaryFolder folder;
  const auto options = metrics_in(folder);
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    auto loss = torch::zeros({1}, at::kBFloat16);
    for (int step = 0; step < 4; ++step) {
      loss.fill_(step);
      metrics.end_step(step, {.loss = loss, .num_samples = 1});
    }
  }));
  const auto rows = read_csv(folder.file("run/steps.csv"));
  REQUIRE(std::stod(rows.at(0).at("loss")) == 0.5);
  REQUIRE(std::stod(rows.at(1).at("loss")) == 2.5);
  REQUIRE(rows.at(1).at("lr") == "");
}

TEST_CASE("a NaN loss appears in every file") {
  TemporaryFolder folder;
  const auto options = metrics_in(folder);
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    for (int step = 0; step < 2; ++step) {
      metrics.end_step(step, {.loss = torch::tensor(NAN), .num_samples = 1});
    }
    const auto epoch = metrics.end_epoch(0, {.test_loss = NAN});
    REQUIRE(std::isnan(epoch.train_loss.value()));
    REQUIRE_FALSE(epoch.train_accuracy.has_value());
  }));
  REQUIRE(read_csv(folder.file("run/steps.csv")).at(0).at("loss") == "nan");
  const auto json = nlohmann::json::parse(testing::read_file(folder.file("run/steps.jsonl")));
  REQUIRE(json.at("loss") == "nan");
  REQUIRE_FALSE(json.contains("accuracy"));
  const auto epoch = read_csv(folder.file("run/epochs.csv")).at(0);
  REQUIRE(epoch.at("train_loss") == "nan");
  REQUIRE(epoch.at("test_loss") == "nan");
  REQUIRE(epoch.at("test_accuracy") == "");
}

TEST_CASE("an interval and an epoch after a loss of NaN or inf are finite again") {
  const double bad = GENERATE(static_cast<double>(NAN), HUGE_VAL);
  TemporaryFolder folder;
  const auto options = metrics_in(folder);
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    const auto end_step = [&](int64_t step, double loss) {
      metrics.end_step(step, {.loss = loss, .num_samples = 1, .num_correct = loss});
    };
    end_step(0, bad);
    end_step(1, 1);
    end_step(2, 2);
    end_step(3, 4);
    CHECK_FALSE(std::isfinite(*metrics.end_epoch(0).train_loss));
    end_step(4, 5);
    end_step(5, 7);
    const auto epoch = metrics.end_epoch(1);
    CHECK(epoch.train_loss == 6);
    CHECK(epoch.train_accuracy == 6);
  }));
  const auto rows = read_csv(folder.file("run/steps.csv"));
  REQUIRE(rows.size() == 3);
  CHECK_FALSE(std::isfinite(std::stod(rows[0].at("loss"))));
  CHECK(std::stod(rows[1].at("loss")) == 3);
  CHECK(std::stod(rows[1].at("accuracy")) == 3);
  CHECK(std::stod(rows[2].at("loss")) == 6);
}

TEST_CASE("a grad_norm of several elements is refused on all ranks") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.log_every = 1;
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    metrics.end_step(0, {.num_samples = 1, .grad_norm = torch::zeros({2})});
  });
  for (const auto& error : errors) {
    REQUIRE(error);
    CHECK_THROWS_WITH(std::rethrow_exception(error),
                      Catch::Contains("metric \"grad_norm\" has 2 elements"));
  }
}

TEST_CASE("negative counts of a step are refused with their names") {
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  auto metrics = testing::metrics_on(plane, {});
  CHECK_THROWS_WITH(metrics.end_step(0, {.num_samples = -4}),
                    Catch::Contains("num_samples=-4") && Catch::Contains("fix: "));
  CHECK_THROWS_WITH(metrics.end_step(0, {.num_samples = 1, .num_targets = -3}),
                    Catch::Contains("num_targets=-3") && Catch::Contains("fix: "));
}

TEST_CASE("energy is the sum over all ranks, and unknown if one rank does not report it") {
  ddp::detail::RankNumbers one{.energy_j = 1.5}, two{.energy_j = 2.25}, unknown;
  using ddp::detail::JobNumbers;
  using ddp::detail::RankNumbers;
  REQUIRE(
      JobNumbers({one, ddp::detail::decode_message<RankNumbers>(ddp::detail::encode_message(two))})
          .total.energy_j == 3.75);
  REQUIRE(std::isnan(JobNumbers({one, unknown}).total.energy_j));
}

namespace {

// The steps in the trace of a run from `first_step` to step 8; empty without a trace.
std::vector<int> traced_steps(MetricsOptions options, int64_t first_step, bool told) {
  // A process has one active recorder and this test's ranks are threads, so the world size is one.
  rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    if (told) {
      metrics.begin(first_step);
    }
    for (int64_t step = first_step; step < 8; ++step) {
      { ddp::TraceScope scope("forward", "compute"); }
      metrics.end_step(step, {.num_samples = 1});
    }
  }));
  std::vector<int> steps;
  const auto text = testing::read_file(options.dir + "/run/trace.json");
  if (text.empty()) {
    return steps;
  }
  const auto json = nlohmann::json::parse(text);
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") == "X") {
      steps.push_back(event["args"]["step"].get<int>());
    }
  }
  return steps;
}

}  // namespace

TEST_CASE("the traced steps of all ranks are written to one file") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.trace_first_step = 2;
  options.trace_steps = 3;
  REQUIRE(traced_steps(options, 0, false) == std::vector<int>{2, 3, 4});
}

TEST_CASE("a resumed run traces its first step, and never names a step that did not run") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.trace_steps = 2;
  const bool told = GENERATE(true, false);
  options.trace_first_step = 0;
  REQUIRE(traced_steps(options, 5, told) == std::vector<int>{});
  options.trace_first_step = 4;
  REQUIRE(traced_steps(options, 5, told) == std::vector<int>{});
  options.trace_first_step = 5;
  REQUIRE(traced_steps(options, 5, told) == (told ? std::vector<int>{5, 6} : std::vector<int>{}));
  options.trace_first_step = 6;
  REQUIRE(traced_steps(options, 5, told) == std::vector<int>{6, 7});
}

TEST_CASE("a language run counts tokens as samples and weights the loss by targets") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.run.sample_unit = "tokens";
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    for (int step = 0; step < 2; ++step) {
      // 100 tokens per rank, of which 3 and 1 have a label.
      metrics.end_step(step, {.loss = torch::tensor(plane.rank() == 0 ? 1.0 : 5.0),
                              .num_samples = 100,
                              .num_correct = torch::tensor(plane.rank() == 0 ? 2 : 1),
                              .num_targets = plane.rank() == 0 ? 3 : 1});
    }
    metrics.add_evaluation(1, {.test_loss = 1.5, .test_accuracy = 0.25});
    metrics.end_epoch(0);
  }));
  const auto rows = read_csv(folder.file("run/steps.csv"));
  REQUIRE(rows.size() == 1);
  REQUIRE(std::stod(rows[0].at("loss")) == (3 * 1.0 + 1 * 5.0) / 4);
  REQUIRE(std::stod(rows[0].at("accuracy")) == 0.75);
  REQUIRE(std::stod(rows[0].at("tokens_per_second")) ==
          Approx(200 * 1000 / std::stod(rows[0].at("step_ms"))));
  REQUIRE(rows[0].count("samples_per_second") == 0);
  const auto evals = read_csv(folder.file("run/evals.csv"));
  REQUIRE(evals.size() == 1);
  REQUIRE(evals[0].at("step") == "2");
  REQUIRE(std::stod(evals[0].at("eval_loss")) == 1.5);
  REQUIRE(std::stod(evals[0].at("eval_accuracy")) == 0.25);
  REQUIRE(read_csv(folder.file("run/epochs.csv"))[0].count("tokens_per_second") == 1);
}

TEST_CASE("numbers from a step's log count like tensors") {
  const auto epoch_of = [](bool by_log) {
    const TemporaryFolder folder;
    testing::ThreadJob job(1);
    testing::ThreadControlPlane plane(job, 0);
    auto metrics = testing::metrics_on(plane, metrics_in(folder));
    for (int step = 0; step < 6; ++step) {
      const auto loss = torch::full({}, step + 0.5);
      const auto correct = torch::tensor(int64_t{step});
      const auto norm = torch::full({}, 3.0 * step);
      ddp::StepMetrics given{.num_samples = 8, .num_targets = 2 + step};
      if (by_log) {
        const auto log = ddp::detail::StepRing::log_now({norm, loss, correct});
        given.grad_norm = log[0];
        given.loss = log[1];
        given.num_correct = log[2];
      } else {
        given.loss = loss;
        given.num_correct = correct;
        given.grad_norm = norm;
      }
      metrics.end_step(step, given);
    }
    const auto epoch = metrics.end_epoch(0);
    const auto rows = read_csv(metrics.folder() + "/steps.csv");
    REQUIRE(rows.size() == 3);
    REQUIRE(std::stod(rows[2].at("grad_norm")) == 15);
    return std::vector<double>{*epoch.train_loss, *epoch.train_accuracy,
                               std::stod(rows[1].at("loss"))};
  };
  const auto expected = epoch_of(false);
  REQUIRE(epoch_of(true) == expected);
  // Steps 2 and 3 have 4 and 5 targets.
  REQUIRE(expected[2] == (4 * 2.5 + 5 * 3.5) / 9);
}
