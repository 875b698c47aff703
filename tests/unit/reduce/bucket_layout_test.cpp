// SPDX-License-Identifier: Apache-2.0
// The layout compared with the vectors of PyTorch's own tests (test_c10d_common.py,
// ComputeBucketAssignmentTest). Also tests libddp's offsets, alignment, padding and groups.
#include "reduce/buckets/bucket_layout.hpp"

#include <numeric>
#include <random>

#include "support/catch.hpp"

namespace {

using ddp::assign_buckets;
using ddp::BucketLayout;
using ddp::BucketLayoutOptions;
using ddp::ParameterSpec;
using Lists = std::vector<std::vector<int>>;

Lists lists(const BucketLayout& layout) {
  Lists result;
  for (const auto& bucket : layout.buckets) {
    result.push_back(bucket.parameters);
  }
  return result;
}

std::vector<ParameterSpec> floats(const std::vector<int64_t>& numels) {
  std::vector<ParameterSpec> specs;
  for (const auto numel : numels) {
    specs.push_back({.numel = numel});
  }
  return specs;
}

// Alternating float32 [50] and float64 [25], with equal byte counts.
std::vector<ParameterSpec> two_dtypes() {
  std::vector<ParameterSpec> specs;
  for (int i = 0; i < 3; ++i) {
    specs.push_back({.numel = 50, .element_bytes = 4, .key = 0});
    specs.push_back({.numel = 25, .element_bytes = 8, .key = 1});
  }
  return specs;
}

std::vector<int> in_order(size_t count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

}  // namespace

TEST_CASE("layout: PyTorch's assignments, in a given order") {
  const auto one = floats({100, 200, 100, 50});
  CHECK(lists(assign_buckets(one, {.limits_bytes = {400}}, in_order(4))) ==
        Lists{{0}, {1}, {2}, {3}});
  const auto two = two_dtypes();
  CHECK(lists(assign_buckets(two, {.limits_bytes = {400}}, in_order(6))) ==
        Lists{{0, 2}, {1, 3}, {4}, {5}});
  const auto small = floats({10, 10, 10, 10});
  CHECK(lists(assign_buckets(small, {.limits_bytes = {40, 80}}, in_order(4))) ==
        Lists{{0}, {1, 2}, {3}});
  CHECK(lists(assign_buckets(two, {.limits_bytes = {200, 400}}, in_order(6))) ==
        Lists{{0}, {1}, {2, 4}, {3, 5}});
}

TEST_CASE("layout: without an order the list of buckets is reversed, not what is in them") {
  CHECK(lists(assign_buckets(two_dtypes(), {.limits_bytes = {400}})) ==
        Lists{{5}, {4}, {1, 3}, {0, 2}});
  CHECK(lists(assign_buckets(floats({1, 2, 3}), {})) == Lists{{0, 1, 2}});
}

TEST_CASE("layout: cuts close the buckets of every key, which are launched together") {
  const auto layout =
      assign_buckets(two_dtypes(), {.limits_bytes = {}, .cuts = {1, 4, 6}}, {5, 4, 3, 2, 1, 0});
  CHECK(lists(layout) == Lists{{5}, {4, 2}, {3}, {0}, {1}});
  std::vector<int> launches;
  for (const auto& bucket : layout.buckets) {
    launches.push_back(bucket.launch);
  }
  CHECK(launches == std::vector<int>{0, 1, 1, 2, 2});
  CHECK(lists(assign_buckets(floats({1, 2, 3}), {.limits_bytes = {}, .cuts = {3}}, {2, 1, 0})) ==
        Lists{{2, 1, 0}});
}

TEST_CASE("layout: the buckets left at the end are launched together, full ones alone") {
  const auto layout = assign_buckets(two_dtypes(), {.limits_bytes = {400}}, in_order(6));
  REQUIRE(layout.buckets.size() == 4);
  CHECK(layout.buckets[0].launch == 0);
  CHECK(layout.buckets[1].launch == 1);
  CHECK(layout.buckets[2].launch == 2);
  CHECK(layout.buckets[3].launch == 2);
}

TEST_CASE("layout: gradients are aligned, buckets padded, arenas without overlap") {
  std::mt19937 generator(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<ParameterSpec> specs(1 + generator() % 30);
    for (auto& spec : specs) {
      spec.key = static_cast<int>(generator() % 2);
      spec.element_bytes = spec.key == 0 ? 4 : 2;
      spec.numel = 1 + static_cast<int64_t>(generator() % 3000);
    }
    const BucketLayoutOptions options{
        .limits_bytes = {1024, 8192},
        .membership = {.world_size = 1 + static_cast<int>(generator() % 5)}};
    auto order = in_order(specs.size());
    std::shuffle(order.begin(), order.end(), generator);
    const auto layout = assign_buckets(specs, options, round % 2 == 0 ? order : std::vector<int>{});
    std::vector<int64_t> end(2);
    for (size_t b = 0; b < layout.buckets.size(); ++b) {
      const auto& bucket = layout.buckets[b];
      const auto key = static_cast<size_t>(bucket.key);
      const int64_t aligned = bucket.key == 0 ? 16 : 32;
      REQUIRE(bucket.begin == end[key]);
      REQUIRE(bucket.numel % (aligned * options.membership.world_size) == 0);
      int64_t used = 0;
      for (size_t i = 0; i < bucket.parameters.size(); ++i) {
        const auto parameter = static_cast<size_t>(bucket.parameters[i]);
        REQUIRE(specs[parameter].key == bucket.key);
        REQUIRE(layout.places[parameter].bucket == static_cast<int>(b));
        REQUIRE(layout.places[parameter].index == static_cast<int>(i));
        REQUIRE(bucket.offsets[i] % aligned == 0);
        REQUIRE(bucket.offsets[i] >= used);
        used = bucket.offsets[i] + specs[parameter].numel;
      }
      REQUIRE(used <= bucket.numel);
      end[key] += bucket.numel;
    }
    for (int key = 0; key < 2; ++key) {
      REQUIRE(end[static_cast<size_t>(key)] <= ddp::max_arena_numel(specs, options, key));
    }
  }
}

TEST_CASE("scheduler: buckets are ready with their last gradient, whatever the order") {
  using Mark = ddp::detail::BucketScheduler::Mark;
  ddp::detail::BucketScheduler scheduler;
  scheduler.reset(assign_buckets(floats({10, 10, 10}), {.limits_bytes = {80}}, in_order(3)));
  for (int pass = 0; pass < 2; ++pass) {  // {0, 1} and {2}
    scheduler.begin_pass();
    CHECK(scheduler.mark_ready(1) == Mark::Pending);
    CHECK(scheduler.mark_ready(2) == Mark::BucketReady);
    CHECK(scheduler.mark_ready(2) == Mark::Twice);
    CHECK_FALSE(scheduler.is_ready(0));
    CHECK_FALSE(scheduler.all_ready());
    CHECK(scheduler.mark_ready(0) == Mark::AllReady);
    CHECK(scheduler.all_ready());
    CHECK(scheduler.num_ready() == 3);
  }
}
