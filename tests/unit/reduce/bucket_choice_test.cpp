// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_choice.hpp"

#include <algorithm>
#include <random>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

using namespace ddp::detail;

namespace {

// 10 us plus 1 us per byte.
double linear(int64_t bytes, bool /*is_last*/) {
  return 10 + static_cast<double>(bytes);
}

// Tries all layouts: returns the smallest exposed time, and the fewest buckets within `tolerance`
// of it.
std::pair<double, size_t> best_of_all(const std::vector<ReadyGradient>& gradients,
                                      const std::function<double(int64_t, bool)>& cost,
                                      double tolerance) {
  const auto n = static_cast<int>(gradients.size());
  std::vector<std::pair<double, size_t>> results;
  for (int mask = 0; mask < 1 << (n - 1); ++mask) {
    std::vector<int> cuts;
    for (int i = 1; i < n; ++i) {
      if ((mask >> (i - 1) & 1) != 0) {
        cuts.push_back(i);
      }
    }
    cuts.push_back(n);
    results.emplace_back(exposed_us(gradients, cuts, cost), cuts.size());
  }
  const double best = std::min_element(results.begin(), results.end())->first;
  size_t fewest = gradients.size();
  for (const auto& [exposed, count] : results) {
    if (exposed <= best + tolerance) {
      fewest = std::min(fewest, count);
    }
  }
  return {best, fewest};
}

}  // namespace

TEST_CASE("reductions follow one another and wait for their gradients") {
  const std::vector<ReadyGradient> gradients{{100, 50}, {100, 60}, {20, 400}};
  CHECK(exposed_us(gradients, {3}, linear) == 230);                 // all after the backward's end
  CHECK(exposed_us(gradients, {2, 3}, linear) == 30);               // 60..270, then 400..430
  CHECK(exposed_us(gradients, {1, 2, 3}, linear) == 30);            // 50..160, ..270, 400..430
  CHECK(exposed_us({{100, 0}, {100, 10}}, {1, 2}, linear) == 210);  // the second waits: 110..220
}

TEST_CASE("the hidden part is not cut without need, the tail is short") {
  const std::vector<ReadyGradient> gradients{{100, 50}, {100, 60}, {20, 400}};
  const auto choice = choose_buckets(gradients, linear, 1);
  CHECK(choice.cuts == std::vector<int>{2, 3});
  CHECK(choice.exposed_us == 30);
  // Latency alone: a cut saves nothing.
  CHECK(choose_buckets({{1, 0}, {1, 1}, {1, 2}}, linear, 1).cuts == std::vector<int>{3});
  CHECK(choose_buckets({{7, 3}}, linear, 1).cuts == std::vector<int>{1});
  CHECK(choose_buckets({}, linear, 1).cuts.empty());
}

TEST_CASE("only the last reduction is exposed and may cost something else") {
  const auto cost = [](int64_t bytes, bool is_last) {
    return (is_last ? 1.0 : 5.0) * static_cast<double>(bytes);
  };
  const std::vector<ReadyGradient> gradients{{10, 0}, {10, 100}};
  CHECK(exposed_us(gradients, {1, 2}, cost) == 10);
  CHECK(choose_buckets(gradients, cost, 0).cuts == std::vector<int>{1, 2});
}

TEST_CASE("the choice is the best of all cuts") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<ReadyGradient> gradients;
    double time = 0;
    const auto count = 1 + random() % 9;
    for (size_t i = 0; i < count; ++i) {
      time += random() % 100;
      gradients.push_back({1 + static_cast<int64_t>(random() % 200), time});
    }
    const double tolerance = round % 2 == 0 ? 0 : 15;
    const auto cost = [&](int64_t bytes, bool is_last) {
      return (is_last ? 8.0 : 12.0) + 0.5 * static_cast<double>(bytes);
    };
    const auto choice = choose_buckets(gradients, cost, tolerance);
    const auto [best, fewest] = best_of_all(gradients, cost, tolerance);
    CHECK(choice.exposed_us <= best + tolerance + 1e-9);
    CHECK(choice.cuts.size() == fewest);
    CHECK(choice.exposed_us == exposed_us(gradients, choice.cuts, cost));
  }
}

TEST_CASE("a choice is kept as text, for the same gradients alone") {
  const std::vector<int64_t> bytes{100, 100, 20};
  const BucketChoice choice{.cuts = {2, 3}, .exposed_us = 30};
  const auto text = choice.to_json(bytes);
  const auto read = BucketChoice::from_json(text, bytes);
  REQUIRE(read.has_value());
  CHECK(read->cuts == choice.cuts);
  CHECK(read->exposed_us == 30);
  CHECK_FALSE(BucketChoice::from_json(text, {100, 120}).has_value());
  CHECK_FALSE(BucketChoice::from_json(text, {100, 100, 24}).has_value());
  for (const auto* damaged :
       {"", "{}", R"({"cuts":[3,2],"exposed_us":1,"gradients":3,"bytes":220})",
        R"({"cuts":[2],"exposed_us":1,"gradients":3,"bytes":220})",
        R"({"cuts":"x","exposed_us":1,"gradients":3,"bytes":220})",
        R"({"cuts":[2.5,3],"exposed_us":1,"gradients":3,"bytes":220})",
        R"({"cuts":[4294967298,3],"exposed_us":1,"gradients":3,"bytes":220})",
        R"({"cuts":[3],"exposed_us":1,"gradients":3,"bytes":1e300})",
        R"({"cuts":[3],"exposed_us":"x","gradients":3,"bytes":220})"}) {
    CHECK_THROWS_AS(BucketChoice::from_json(damaged, bytes), ddp::ReadError);
  }
}
