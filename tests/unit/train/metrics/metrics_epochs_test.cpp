// SPDX-License-Identifier: Apache-2.0
// The rows of epochs.csv: what they count, and the constants of the run.
#include <torch/torch.h>

#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "unit/train/metrics/metrics_on.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using testing::metrics_in;
using testing::read_csv;
using testing::rethrow;
using testing::run_ranks;
using testing::TemporaryFolder;

}  // namespace

TEST_CASE("an epoch's row counts the steps that it is of") {
  TemporaryFolder folder;
  const auto train = [&](int64_t first_step, int64_t last_step) {
    rethrow(run_ranks(1, [&](ddp::ControlPlane& plane) {
      auto metrics = testing::metrics_on(plane, metrics_in(folder));
      metrics.begin(first_step, /*num_steps=*/8, /*steps_per_epoch=*/4);
      for (auto step = first_step; step < last_step; ++step) {
        metrics.end_step(step, {.loss = torch::full({}, step), .num_samples = 1});
        if (step % 4 == 3) {
          metrics.end_epoch(step / 4);
        }
      }
    }));
  };
  train(0, 6);
  train(6, 8);  // resumes inside the second epoch
  const auto epochs = read_csv(folder.file("run/epochs.csv"));
  REQUIRE(epochs.size() == 2);
  CHECK(epochs[0].at("epoch_steps") == "4");
  CHECK(std::stod(epochs[0].at("train_loss")) == 1.5);
  CHECK(epochs[1].at("epoch_steps") == "2");
  CHECK(epochs[1].at("steps_per_epoch") == "4");
  CHECK(std::stod(epochs[1].at("train_loss")) == 6.5);
}

TEST_CASE("an epoch's row has constants of the settings that the program used") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  const auto row = [&] {
    rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
      auto metrics = testing::metrics_on(plane, options);
      metrics.end_epoch(0);
    }));
    return read_csv(folder.file("run/epochs.csv")).back();
  };
  options.configured = {.precision = "bf16",
                        .amp = ddp::detail::UsageMark::make(),
                        .batch_size = 16,
                        .grad_accum_steps = 2,
                        .loader = ddp::detail::UsageMark::make(),
                        .bucket_cap_mb = 25,
                        .ddp = ddp::detail::UsageMark::make()};
  auto epoch = row();
  for (const char* column :
       {"precision", "global_batch_size", "batch_size_per_gpu", "bucket_cap_mb"}) {
    INFO(column);
    CHECK(epoch.at(column) == "");
  }
  options.configured.amp.set();
  options.configured.loader.record(32);   // training, on 2 ranks
  options.configured.loader.record(256);  // evaluation
  options.configured.ddp.set();
  epoch = row();
  CHECK(epoch.at("precision") == "bf16");
  CHECK(epoch.at("global_batch_size") == "64");
  CHECK(epoch.at("batch_size_per_gpu") == "32");
  CHECK(epoch.at("bucket_cap_mb") == "25");
  // The program gave its loader another batch than the settings.
  options.configured.loader = ddp::detail::UsageMark::make();
  options.configured.loader.record(48);
  CHECK(row().at("global_batch_size") == "96");
  options.configured.loader.record(64);
  CHECK(row().at("global_batch_size") == "");  // which of the two trains is not known
  options.run = {.precision = "fp8", .batch_size_per_rank = 5, .bucket_cap_mb = 1};
  epoch = row();
  CHECK(epoch.at("precision") == "fp8");
  CHECK(epoch.at("global_batch_size") == "10");
  CHECK(epoch.at("bucket_cap_mb") == "1");
}

TEST_CASE("an uneven global batch is reported with its mean size per GPU") {
  TemporaryFolder folder;
  auto options = metrics_in(folder);
  options.run = {.batch_size_per_rank = 32, .global_batch_size = 101};
  rethrow(run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto metrics = testing::metrics_on(plane, options);
    metrics.end_epoch(0);
  }));
  const auto epoch = read_csv(folder.file("run/epochs.csv")).at(0);
  REQUIRE(epoch.at("global_batch_size") == "101");
  REQUIRE(epoch.at("batch_size_per_gpu") == "50.5");
}
