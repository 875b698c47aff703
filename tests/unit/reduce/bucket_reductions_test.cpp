// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_reductions.hpp"

#include <ATen/ATen.h>

#include <memory>
#include <stdexcept>

#include "ddp/core/error.hpp"
#include "fake_communicator.hpp"
#include "ops/shared/flop_counter.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using testing::message_of;

namespace {

/// Three parameters in a bucket each. This rank's gradients are 1; those of the other rank are 3.
struct ThreeBuckets {
  ThreeBuckets() {
    communicator->other_rank = [](const at::Tensor& own) { return own * 3; };
    gradients.set_layout(testing::one_bucket_each(gradients.specs(), 2));
  }

  void begin_pass() {
    reductions.begin_pass();
    for (int b = 0; b < 3; ++b) {
      gradients.bucket(b).buffer.fill_(1);
    }
  }
  void start_all() {
    begin_pass();
    for (size_t b = 0; b < 3; ++b) {
      reductions.start(b, b);
    }
  }
  bool all_are(int bucket, double value) const {
    return gradients.bucket(bucket).buffer.eq(value).all().item<bool>();
  }
  const auto& calls() const { return communicator->calls; }

  std::shared_ptr<testing::FakeCommunicator> communicator =
      std::make_shared<testing::FakeCommunicator>();
  ddp::detail::GradientArena gradients{{{"a", at::zeros({8}).requires_grad_()},
                                        {"b", at::zeros({8}).requires_grad_()},
                                        {"c", at::zeros({8}).requires_grad_()}},
                                       communicator,
                                       testing::options_of_any_layout()};
  ddp::detail::WeightedMean mean{communicator, gradients};
  ddp::detail::BucketReductions reductions{communicator, gradients, mean};
};

/// start() of bucket 1 throws.
struct HookWithoutBucket1 : ddp::CommHook {
  std::string name() const override { return "without bucket 1"; }
  void start(ddp::GradBucket& bucket) override {
    if (bucket.index == 1) {
      throw std::runtime_error("not this one");
    }
  }
  void finish(ddp::GradBucket& bucket) override { finished.push_back(bucket.index); }

  std::vector<int> finished;
};

}  // namespace

TEST_CASE("each bucket becomes the mean over the ranks") {
  ThreeBuckets three;
  three.start_all();
  REQUIRE(three.calls().size() == 3);
  CHECK(three.all_are(0, 1));
  three.reductions.finish();
  for (int b = 0; b < 3; ++b) {
    const auto& call = three.calls()[static_cast<size_t>(b)];
    CHECK(call.operation == "all_reduce");
    CHECK(call.op == ddp::ReduceOp::Avg);
    CHECK(three.all_are(b, 2));
  }
}

TEST_CASE("a weighted sum is started once and scales every bucket") {
  ThreeBuckets three;
  three.mean.add(2);
  three.start_all();
  REQUIRE(three.calls().size() == 4);
  CHECK(three.calls()[0].tensor.numel() == 1);  // the counts
  CHECK(three.calls()[1].op == ddp::ReduceOp::Sum);
  three.reductions.finish();
  for (int b = 0; b < 3; ++b) {
    CHECK(three.all_are(b, 0.5));  // (1 + 3) / (2 + 6)
  }
}

TEST_CASE("a hook that reads the count finds it in start()") {
  struct Hook : ddp::CommHook {
    std::string name() const override { return "reads the count"; }
    bool reads_count() const override { return true; }
    void start(ddp::GradBucket& bucket) override { bucket.buffer.mul_(bucket.inverse_count); }
    void finish(ddp::GradBucket&) override {}
  };
  ThreeBuckets three;
  three.reductions.set_hook(std::make_shared<Hook>());
  three.mean.add(2);
  three.start_all();
  CHECK(three.calls()[0].work->num_waits() == 1);
  three.reductions.finish();
  for (int b = 0; b < 3; ++b) {
    CHECK(three.all_are(b, 0.125));  // 1 / (2 + 6)
  }
}

TEST_CASE("the products of a hook are no FLOPs of the model") {
  struct Hook : ddp::CommHook {
    std::string name() const override { return "products"; }
    void start(ddp::GradBucket& /*bucket*/) override { at::mm(matrix, matrix); }
    void finish(ddp::GradBucket& /*bucket*/) override { at::mm(matrix, matrix); }
    at::Tensor matrix = at::ones({2, 2});
  };
  ThreeBuckets three;
  three.reductions.set_hook(std::make_shared<Hook>());
  const ddp::ops::detail::FlopCounter counter;
  three.start_all();
  three.reductions.finish();
  CHECK(counter.flops() == 0);
}

TEST_CASE("a missing count ends the start") {
  ThreeBuckets three;
  three.mean.require_counts(true);
  three.begin_pass();
  CHECK_THROWS_AS(three.reductions.start(0, 0), ddp::SettingsError);
  CHECK(three.calls().empty());
}

TEST_CASE("a bucket whose start threw is left out") {
  ThreeBuckets three;
  SECTION("by the reducer itself") {
    three.mean.require_counts(true);
    three.begin_pass();
    CHECK_THROWS_AS(three.reductions.start(0, 0), ddp::SettingsError);
    three.reductions.finish();
    CHECK(three.all_are(0, 1));
  }
  SECTION("by a hook") {
    const auto hook = std::make_shared<HookWithoutBucket1>();
    three.reductions.set_hook(hook);
    three.begin_pass();
    three.reductions.start(0, 0);
    CHECK_THROWS_AS(three.reductions.start(1, 1), std::runtime_error);
    three.reductions.start(2, 2);
    three.reductions.finish();
    CHECK(hook->finished == std::vector<int>{0, 2});
  }
}

TEST_CASE("sharded buckets are reduced in this rank's part") {
  ThreeBuckets three;
  three.gradients.shard();
  three.start_all();
  three.reductions.finish();
  for (int b = 0; b < 3; ++b) {
    CHECK(three.calls()[static_cast<size_t>(b)].operation == "reduce_scatter");
    CHECK(three.gradients.bucket_shard(b).eq(2).all().item<bool>());
    CHECK(three.gradients.bucket(b).buffer[-1].item<double>() == 1);
  }
}

TEST_CASE("a hook may assign another buffer") {
  ThreeBuckets three;
  three.reductions.set_hook(ddp::make_function_hook("times 5", [](ddp::GradBucket& bucket) {
    bucket.buffer = bucket.buffer * 5;
    return nullptr;
  }));
  three.start_all();
  CHECK(three.calls().empty());
  three.reductions.finish();
  for (int b = 0; b < 3; ++b) {
    CHECK(three.all_are(b, 5));
    CHECK(three.gradients.buckets()[static_cast<size_t>(b)].buffer.is_same(
        three.gradients.bucket(b).buffer));
  }
}

TEST_CASE("a buffer of another shape is refused, and the next pass begins with the bucket's own") {
  ThreeBuckets three;
  const bool is_defined = GENERATE(true, false);
  three.reductions.set_hook(ddp::make_function_hook("cuts", [&](ddp::GradBucket& bucket) {
    bucket.buffer = is_defined ? bucket.buffer.narrow(0, 0, 1).clone() : at::Tensor();
    return nullptr;
  }));
  three.start_all();
  const auto message = message_of<ddp::SettingsError>([&] { three.reductions.finish(); });
  CHECK_THAT(message, Catch::Contains("the comm hook cuts left") && Catch::Contains("of bucket 0"));
  CHECK_THAT(message, Catch::Contains(is_defined ? "Float [1] on cpu" : "an undefined tensor"));
  three.start_all();
  three.reductions.begin_pass();
  CHECK(three.gradients.buckets()[2].buffer.is_same(three.gradients.bucket(2).buffer));
}

TEST_CASE("all reductions are waited for where one throws, and its error is thrown") {
  ThreeBuckets three;
  three.start_all();
  three.calls()[0].work->fail("rank 1 is gone");
  three.calls()[1].work->fail("a later error");
  CHECK(message_of<ddp::PeerLostError>([&] { three.reductions.finish(); }) == "rank 1 is gone");
  for (const auto& call : three.calls()) {
    CHECK(call.work->num_waits() == 1);
  }
  CHECK(three.all_are(2, 2));
}

TEST_CASE("all reductions are waited for where the sum of the counts throws") {
  ThreeBuckets three;
  three.mean.add(1);
  three.start_all();
  three.calls()[0].work->fail("no counts");
  CHECK(message_of<ddp::PeerLostError>([&] { three.reductions.finish(); }) == "no counts");
  for (const auto& call : three.calls()) {
    CHECK(call.work->num_waits() == 1);
  }
}

TEST_CASE("a failed reduction is not waited for again") {
  ThreeBuckets three;
  three.start_all();
  three.calls()[0].work->fail("rank 1 is gone");
  CHECK_THROWS_AS(three.reductions.finish(), ddp::PeerLostError);
  CHECK_NOTHROW(three.reductions.abandon());
}

TEST_CASE("abandoned reductions end before their buckets are used again") {
  ThreeBuckets three;
  three.begin_pass();
  three.reductions.start(0, 0);
  three.reductions.abandon();
  CHECK(three.calls()[0].work->num_waits() == 1);
  three.start_all();
  three.reductions.finish();
  CHECK(three.calls()[0].work->num_waits() == 1);
  CHECK(three.all_are(0, 2));
}
