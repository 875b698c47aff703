// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_tuner.hpp"

#include <ATen/ATen.h>

#include <chrono>
#include <memory>
#include <thread>

#include "comm/tuning/group_choices.hpp"
#include "fake_communicator.hpp"
#include "reduce/buckets/bucket_choice.hpp"
#include "reduce/buckets/gradient_arena.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/stderr_of.hpp"

using testing::num_found;
using testing::stderr_of;

namespace {

constexpr int64_t kLarge = 1 << 18;  // elements: 1 MiB
constexpr int64_t kSmall = 256;      // elements: 1 KiB
const std::vector<int> kLargeFirst{1, 0};

/// "small" and "large"; the backward computes the gradient of "large" first.
struct TunedBuckets {
  explicit TunedBuckets(const ddp::DdpOptions& options_in,
                        const ddp::CommunicatorPtr& group_in = nullptr)
      : options(options_in), group(group_in ? group_in : communicator) {}

  std::string plan_name() const {
    return ddp::concat("buckets of 2 gradients, ", 4 * (kSmall + kLarge), " bytes, hook none");
  }
  static std::string plan_of(const std::vector<int>& cuts) {
    return ddp::detail::BucketChoice{.cuts = cuts}.to_json({4 * kLarge, 4 * kSmall});
  }
  /// The backward after `num_passes` others; "small" is ready 20 ms after "large".
  void run_backward(int64_t num_passes) {
    tuner.begin_backward(num_passes, kLargeFirst);
    tuner.record_ready(1, false);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    tuner.record_ready(0, true);
    tuner.end_backward();
  }
  size_t num_buckets() const { return gradients.layout().buckets.size(); }

  ddp::DdpOptions options;
  std::shared_ptr<testing::FakeCommunicator> communicator =
      std::make_shared<testing::FakeCommunicator>();
  ddp::CommunicatorPtr group;
  ddp::detail::GradientArena gradients{{{"small", at::zeros({kSmall}).requires_grad_()},
                                        {"large", at::zeros({kLarge}).requires_grad_()}},
                                       group,
                                       options};
  ddp::detail::WeightedMean mean{group, gradients};
  ddp::detail::BucketReductions reductions{group, gradients, mean};
  ddp::detail::BucketTuner tuner{group, options, gradients, reductions};
};

}  // namespace

TEST_CASE("buckets are laid out again once the ready order is known") {
  TunedBuckets tuned(ddp::DdpOptions{.bucket_cap_mb = 0.5});
  CHECK(tuned.num_buckets() == 1);
  CHECK(tuned.tuner.will_rebuild());
  CHECK_FALSE(tuned.tuner.is_due(0, {}));
  CHECK(tuned.tuner.is_due(1, kLargeFirst));
  tuned.tuner.rebuild(kLargeFirst);
  CHECK(tuned.tuner.has_rebuilt());
  CHECK_FALSE(tuned.tuner.is_due(2, kLargeFirst));
  CHECK(tuned.gradients.layout().version == 1);
  REQUIRE(tuned.num_buckets() == 2);
  CHECK(tuned.gradients.layout().buckets[0].parameters == std::vector<int>{1});
}

TEST_CASE("a static graph knows its ready order after two backwards") {
  TunedBuckets tuned(ddp::DdpOptions{.find_unused_parameters = true, .static_graph = true});
  CHECK_FALSE(tuned.tuner.is_due(1, kLargeFirst));
  CHECK(tuned.tuner.is_due(2, kLargeFirst));
}

TEST_CASE("buckets stay where the ready order changes or nothing is sent") {
  const TunedBuckets finding(ddp::DdpOptions{.find_unused_parameters = true});
  CHECK_FALSE(finding.tuner.will_rebuild());
  TunedBuckets alone(ddp::DdpOptions{.bucket_cap_mb = ddp::kAutoBuckets},
                     ddp::make_single_communicator(at::kCPU));
  CHECK_FALSE(alone.tuner.will_rebuild());
  CHECK_FALSE(alone.tuner.is_due(3, kLargeFirst));
}

TEST_CASE("automatic buckets are cut where measured times expose the least communication") {
  TunedBuckets tuned(testing::options_of_any_layout());
  const bool is_slow = GENERATE(true, false);
  // The reduction of both takes 10 ms or nothing, and that of "large" fits into the 20 ms.
  tuned.communicator->measured_rows = {{.num_bytes = 1 << 10, .us = 1},
                                       {.num_bytes = 1 << 20, .us = is_slow ? 10000.0 : 1.0}};
  CHECK_FALSE(tuned.tuner.is_due(1, kLargeFirst));
  tuned.run_backward(1);
  CHECK_FALSE(tuned.tuner.is_due(2, kLargeFirst));
  tuned.run_backward(2);
  CHECK(tuned.tuner.is_due(3, kLargeFirst));
  const auto log = stderr_of([&] { tuned.tuner.rebuild(kLargeFirst); });
  CHECK(tuned.num_buckets() == (is_slow ? 2 : 1));
  CHECK_THAT(log, Catch::Contains(is_slow ? "2 reductions per step" : "1 reductions per step"));
  CHECK(tuned.communicator->choices().plan().find(tuned.plan_name()).has_value());
}

TEST_CASE("automatic buckets without measured times are cut at the limits") {
  TunedBuckets tuned(testing::options_of_any_layout());
  tuned.tuner.rebuild(kLargeFirst);
  CHECK(tuned.num_buckets() == 2);  // the first limit is 1 MiB
  CHECK_FALSE(tuned.communicator->choices().plan().find(tuned.plan_name()).has_value());
}

TEST_CASE("a plan replaces the measurement") {
  TunedBuckets tuned(testing::options_of_any_layout());
  const std::vector<int> cuts = GENERATE(std::vector<int>{2}, std::vector<int>{1, 2});
  tuned.communicator->choices().plan().set(tuned.plan_name(), TunedBuckets::plan_of(cuts));
  CHECK(tuned.tuner.is_due(1, kLargeFirst));
  stderr_of([&] { tuned.tuner.rebuild(kLargeFirst); });
  CHECK(tuned.num_buckets() == cuts.size());
}

TEST_CASE("a damaged plan is reported once, and the buckets are measured") {
  TunedBuckets tuned(testing::options_of_any_layout());
  tuned.communicator->choices().plan().set(tuned.plan_name(), TunedBuckets::plan_of({2, 1}));
  const auto log = stderr_of([&] {
    CHECK_FALSE(tuned.tuner.is_due(1, kLargeFirst));
    tuned.run_backward(1);
    tuned.run_backward(2);
    CHECK(tuned.tuner.is_due(3, kLargeFirst));
    tuned.tuner.rebuild(kLargeFirst);
  });
  CHECK(num_found(log, "the plan's buckets are damaged: cuts must ascend") == 1);
  CHECK(num_found(log, "this run measures them") == 1);
  const auto measured = tuned.communicator->choices().plan().find(tuned.plan_name());
  REQUIRE(measured.has_value());
  CHECK_NOTHROW(ddp::detail::BucketChoice::from_json(*measured, {4 * kLarge, 4 * kSmall}));
}

TEST_CASE("the plan of another model is not taken") {
  TunedBuckets tuned(testing::options_of_any_layout());
  tuned.communicator->choices().plan().set(tuned.plan_name(),
                                           ddp::detail::BucketChoice{.cuts = {2}}.to_json({8, 8}));
  CHECK(stderr_of([&] { CHECK_FALSE(tuned.tuner.is_due(1, kLargeFirst)); }).empty());
}

TEST_CASE("an incomplete ready order is refused") {
  TunedBuckets tuned(ddp::DdpOptions{});
  CHECK_THAT(testing::message_of([&] { tuned.tuner.rebuild({1}); }),
             Catch::Contains("incomplete ready order"));
  CHECK_FALSE(tuned.tuner.has_rebuilt());
}

TEST_CASE("a bucket size of zero or less is refused") {
  CHECK_THAT(
      testing::message_of([] { ddp::bucket_limits_bytes(ddp::DdpOptions{.bucket_cap_mb = -1}); }),
      Catch::Contains("ddp.bucket_cap_mb=-1 must be more than 0"));
}
