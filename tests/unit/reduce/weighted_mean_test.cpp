// SPDX-License-Identifier: Apache-2.0
#include "reduce/weighted_mean.hpp"

#include <ATen/ATen.h>

#include <limits>
#include <memory>
#include <vector>

#include "ddp/core/error.hpp"
#include "fake_communicator.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

namespace {

struct MeanOfTwoRanks {
  explicit MeanOfTwoRanks(at::ScalarType dtype = at::kFloat)
      : gradients({{"a", at::zeros({2, 3}, dtype).requires_grad_()},
                   {"b", at::zeros({4}, dtype).requires_grad_()}},
                  communicator, {}) {}

  ddp::GradBucket& bucket() { return gradients.buckets()[0]; }
  /// One backward after the sum over the ranks left `sum` in the bucket.
  at::Tensor scaled(double sum) {
    mean.start();
    mean.set_bucket_divisor(bucket());
    mean.finish();
    bucket().shard.fill_(sum);
    mean.scale(bucket());
    return bucket().shard;
  }
  /// Leaves 1 as the mean of every parameter.
  void reduce_1() {
    for (const auto& parameter : gradients.parameters()) {
      parameter.tensor.mutable_grad() = testing::filled_like(parameter.tensor, 1);
    }
    gradients.gather_local({0, 1});
    gradients.publish({});
  }

  std::shared_ptr<testing::FakeCommunicator> communicator =
      std::make_shared<testing::FakeCommunicator>();
  ddp::detail::GradientArena gradients;
  ddp::detail::WeightedMean mean{communicator, gradients};
};

}  // namespace

TEST_CASE("without counts the collective averages") {
  MeanOfTwoRanks two;
  CHECK(two.mean.reduce_op() == ddp::ReduceOp::Avg);
  CHECK(two.scaled(6).eq(6).all().item<bool>());
  CHECK(two.communicator->calls.empty());
  CHECK(two.bucket().divisor == 2);
  CHECK_FALSE(two.bucket().inverse_count.defined());
}

TEST_CASE("a divisor replaces the world size until it is 0") {
  MeanOfTwoRanks two;
  two.mean.set_divisor(3);
  CHECK(two.mean.reduce_op() == ddp::ReduceOp::Sum);
  CHECK(two.scaled(6).eq(2).all().item<bool>());
  CHECK(two.bucket().divisor == 3);
  two.mean.set_divisor(2);
  CHECK(two.mean.reduce_op() == ddp::ReduceOp::Avg);
  two.mean.set_divisor(0);
  CHECK(two.mean.reduce_op() == ddp::ReduceOp::Avg);
  CHECK(two.scaled(6).eq(6).all().item<bool>());
}

TEST_CASE("counts of the host and of the device add up over backwards and ranks") {
  MeanOfTwoRanks two;
  two.communicator->other_rank = [](const at::Tensor& own) { return at::full_like(own, 5); };
  two.mean.add(2);
  two.mean.add(3);
  two.mean.add(at::full({}, 4, at::kLong));
  two.mean.add(at::full({1}, 6, at::kDouble));
  CHECK(two.mean.counts().host == 5);
  CHECK(two.mean.reduce_op() == ddp::ReduceOp::Sum);
  CHECK(two.scaled(40).eq(2).all().item<bool>());  // 40 / (5 + 10 + 5)
  REQUIRE(two.communicator->calls.size() == 1);
  CHECK(two.communicator->calls[0].op == ddp::ReduceOp::Sum);
  CHECK(two.bucket().inverse_count.item<double>() == Approx(1.0 / 20));
}

TEST_CASE("a count is the tensor's value at the call, also if the caller refills the tensor") {
  const auto shape = GENERATE(std::vector<int64_t>{}, std::vector<int64_t>{1});
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kLong);
  for (const auto model_dtype : {at::kFloat, at::kDouble}) {
    CAPTURE(shape, dtype, model_dtype);
    MeanOfTwoRanks two(model_dtype);
    const auto buffer = at::full(shape, 4, dtype);
    two.mean.add(buffer);
    buffer.fill_(12);
    CHECK(two.scaled(8).eq(1).all().item<bool>());  // 8 / (4 + 4)
    two.mean.add(buffer);
    buffer.fill_(100);
    CHECK(two.scaled(32).eq(1).all().item<bool>());  // 32 / (16 + 16)
  }
}

TEST_CASE("a count of NaN makes the gradient NaN") {
  MeanOfTwoRanks two;
  two.mean.add(at::full({}, std::numeric_limits<float>::quiet_NaN()));
  CHECK(two.scaled(6).isnan().all().item<bool>());
}

TEST_CASE("float64 gradients are divided in float64") {
  MeanOfTwoRanks two(at::kDouble);
  two.mean.add(3);
  CHECK(two.scaled(1)[0].item<double>() == 1.0 / 6);
  two.mean.reset();
  two.mean.add(at::full({}, (1 << 24) + 1, at::kLong));
  CHECK(two.scaled(1)[0].item<double>() == 1.0 / (2.0 * ((1 << 24) + 1)));
}

TEST_CASE("used counts do not reach the next backward") {
  MeanOfTwoRanks two;
  two.mean.add(2);
  two.mean.add(at::ones({1}));
  two.scaled(1);
  two.mean.reset();
  CHECK(two.mean.counts().empty());
  CHECK(two.mean.reduce_op() == ddp::ReduceOp::Avg);
  two.mean.add(1);
  CHECK(two.scaled(10).eq(5).all().item<bool>());  // 10 / (1 + 1)
}

TEST_CASE("counts are taken out and put back") {
  MeanOfTwoRanks two;
  two.mean.add(4);
  const auto kept = two.mean.counts();
  two.mean.reset();
  two.mean.set_counts(kept);
  CHECK(two.scaled(24).eq(3).all().item<bool>());
}

TEST_CASE("a sum of counts that was not started is not waited for") {
  MeanOfTwoRanks two;
  two.mean.add(1);
  CHECK_NOTHROW(two.mean.finish());
  two.mean.start();
  two.mean.abandon();
  CHECK_NOTHROW(two.mean.finish());
  CHECK(two.communicator->calls[0].work->num_waits() == 0);
}

TEST_CASE("the mean of nothing is zero") {
  MeanOfTwoRanks two;
  two.mean.add(0);
  CHECK(two.mean.counts().empty());
  CHECK(two.scaled(6).eq(0).all().item<bool>());
}

TEST_CASE("a backward without a required count throws") {
  MeanOfTwoRanks two;
  two.mean.require_counts(true);
  CHECK_THAT(testing::message_of<ddp::SettingsError>([&] { two.mean.check_counts(); }),
             Catch::Contains("JoinOptions::weighted=true"));
  two.mean.add(0);
  CHECK_NOTHROW(two.mean.check_counts());
  two.mean.reset();
  two.mean.require_counts(false);
  CHECK_NOTHROW(two.mean.check_counts());
}

TEST_CASE("earlier means are set aside where the sum is not divided by the number of ranks") {
  MeanOfTwoRanks two;
  const auto slot = two.gradients.slot(0).memory;
  two.reduce_1();
  two.mean.begin_backward();
  CHECK(slot.eq(1).all().item<bool>());
  SECTION("by a divisor") {
    two.mean.set_divisor(3);
    CHECK(slot.eq(1).all().item<bool>());  // zero_grad() may follow
    two.mean.begin_backward();
  }
  SECTION("by a count") {
    two.mean.add(3);
  }
  SECTION("by a count of the device") {
    two.mean.add(at::ones({}));
  }
  CHECK(slot.eq(0).all().item<bool>());
}

TEST_CASE("gradients that wait for one divisor refuse another") {
  MeanOfTwoRanks two;
  SECTION("counts after backward() under no_sync()") {
    two.mean.record_gradient(/*is_reduced=*/false);
    const auto counts = at::ones({});
    for (const bool on_device : {false, true}) {
      const auto message = testing::message_of<ddp::SettingsError>(
          [&] { on_device ? two.mean.add(counts) : two.mean.add(1); });
      CHECK_THAT(message, Catch::Contains("weighted_backward while gradients of backward()"));
    }
    CHECK_NOTHROW(two.mean.record_gradient(/*is_reduced=*/true));
    two.mean.reset();  // that backward ended
    CHECK_NOTHROW(two.mean.add(1));
  }
  SECTION("backward() after counts") {
    two.mean.add(1);
    two.mean.set_runs_weighted(true);
    CHECK_NOTHROW(two.mean.record_gradient(/*is_reduced=*/false));
    two.mean.set_runs_weighted(false);
    for (const bool is_reduced : {false, true}) {
      const auto message =
          testing::message_of<ddp::SettingsError>([&] { two.mean.record_gradient(is_reduced); });
      CHECK_THAT(message, Catch::Contains("backward() while gradients of weighted_backward"));
    }
    two.mean.reset();
    CHECK_NOTHROW(two.mean.record_gradient(/*is_reduced=*/true));
    CHECK_NOTHROW(two.mean.add(1));
  }
}

TEST_CASE("another divisor cannot part a mean from what was added to it") {
  MeanOfTwoRanks two;
  const auto slot = two.gradients.slot(0).memory;
  two.reduce_1();
  two.mean.set_divisor(3);
  SECTION("before it is set aside") {
    two.mean.record_gradient(/*is_reduced=*/false);
    two.mean.set_divisor(2);  // both ranks have input, so the mean may stay
    CHECK_NOTHROW(two.mean.begin_backward());
    two.mean.set_divisor(3);
    CHECK_THAT(
        testing::message_of<ddp::SettingsError>([&] { two.mean.begin_backward(); }),
        Catch::Contains("the divisor of a join may change") && Catch::Contains("zero_grad()"));
    CHECK(slot.eq(1).all().item<bool>());
  }
  SECTION("after it was set aside") {
    two.mean.begin_backward();
    two.mean.record_gradient(/*is_reduced=*/false);
    CHECK_NOTHROW(two.mean.begin_backward());
    CHECK(slot.eq(0).all().item<bool>());
  }
}
