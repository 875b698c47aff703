// SPDX-License-Identifier: Apache-2.0
// Sums of losses given as tensors and by logs.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "train/graph/step_ring.hpp"
#include "train/loss_sums.hpp"

using ddp::StepMetrics;
using ddp::detail::LossSums;
using ddp::detail::StepRing;

TEST_CASE("a loss counts once per target, correct answers count as they are") {
  LossSums sums(at::kCPU);
  sums.add({.loss = torch::tensor(2.0F), .num_samples = 4});
  sums.add({.loss = torch::tensor(5.0F),
            .num_samples = 4,
            .num_correct = torch::tensor(3),
            .num_targets = 10});
  const auto [totals, grad_norm] = sums.read({.grad_norm = torch::tensor(7.0F)});
  REQUIRE(totals.loss_sum == 4 * 2 + 10 * 5);
  REQUIRE(totals.loss_samples == 14);
  REQUIRE(totals.correct == 3);
  REQUIRE(totals.correct_samples == 10);
  REQUIRE(grad_norm == 7);
  REQUIRE_FALSE(sums.read({}).grad_norm);
}

TEST_CASE("a step may log some numbers and give others as tensors") {
  LossSums sums(at::kCPU);
  const StepMetrics mixed{.loss = StepRing::log_now({torch::tensor(2.0F)})[0],
                          .num_samples = 3,
                          .grad_norm = torch::tensor(7.0F),
                          .num_correct = torch::tensor(1)};
  sums.add(mixed);
  const auto [totals, grad_norm] = sums.read(mixed);
  REQUIRE(totals.loss_sum == 6);
  REQUIRE(totals.loss_samples == 3);
  REQUIRE(totals.correct == 1);
  REQUIRE(totals.correct_samples == 3);
  REQUIRE(grad_norm == 7);
}

TEST_CASE("steps with tensors and steps with a log add up, in either order") {
  const bool log_first = GENERATE(true, false);
  const StepMetrics by_tensor{.loss = torch::tensor(2.0F), .num_samples = 4};
  const auto log =
      StepRing::log_now({torch::tensor(9.0F), torch::tensor(5.0F), torch::tensor(2.0F)});
  const StepMetrics by_log{
      .loss = log[1], .num_samples = 3, .grad_norm = log[0], .num_correct = log[2]};
  LossSums sums(at::kCPU);
  sums.add(log_first ? by_log : by_tensor);
  sums.add(log_first ? by_tensor : by_log);
  const auto [totals, grad_norm] = sums.read(by_log);
  REQUIRE(totals.loss_sum == 4 * 2 + 3 * 5);
  REQUIRE(totals.loss_samples == 7);
  REQUIRE(totals.correct == 2);
  REQUIRE(totals.correct_samples == 3);
  REQUIRE(grad_norm == 9);
}
