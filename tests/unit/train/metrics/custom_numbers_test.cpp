// SPDX-License-Identifier: Apache-2.0
// A program's custom metrics over the ranks of a job.
#include <cmath>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "train/metrics/custom_numbers.hpp"

namespace {

using ddp::MetricReduction;
using ddp::detail::CustomNumber;
using ddp::detail::reduce_custom;

CustomNumber number_of(MetricReduction reduction,
                       const std::vector<std::pair<double, double>>& values) {
  CustomNumber number{.name = "m", .reduction = reduction};
  number.clear();
  number.is_logged = true;
  for (const auto& [value, weight] : values) {
    number.add(value, weight);
  }
  return number;
}

double over_two_ranks(MetricReduction reduction, double value = 4) {
  return reduce_custom(
             {{number_of(reduction, {{value, 1}, {1, 2}})}, {number_of(reduction, {{2, 5}})}},
             /*seconds=*/2)
      .at(0)
      .value.value();
}

}  // namespace

TEST_CASE("custom metrics are reduced over the values of all ranks") {
  CHECK(over_two_ranks(MetricReduction::Mean) == (4.0 + 2 * 1 + 5 * 2) / 8);
  CHECK(over_two_ranks(MetricReduction::Sum) == 7);
  CHECK(over_two_ranks(MetricReduction::Min) == 1);
  CHECK(over_two_ranks(MetricReduction::Max) == 4);
  CHECK(over_two_ranks(MetricReduction::Rate) == 3.5);
  const auto rate = reduce_custom({{number_of(MetricReduction::Rate, {{1, 1}})}}, 1).at(0);
  CHECK(rate.column() == "m_per_second");
}

TEST_CASE("a NaN stays, whatever the reduction") {
  const auto reduction = GENERATE(MetricReduction::Mean, MetricReduction::Sum, MetricReduction::Min,
                                  MetricReduction::Max, MetricReduction::Rate);
  CHECK(std::isnan(over_two_ranks(reduction, NAN)));
}

TEST_CASE("no value, and a mean without weight, are unknown") {
  const auto reduction =
      GENERATE(MetricReduction::Mean, MetricReduction::Sum, MetricReduction::Max);
  const auto none = number_of(reduction, {});
  CHECK_FALSE(reduce_custom({{none}, {none}}, 1).at(0).value);
  CHECK(reduce_custom({{none}, {number_of(reduction, {{3, 2}})}}, 1).at(0).value == 3);
  CHECK_FALSE(reduce_custom({{number_of(MetricReduction::Mean, {{3, 0}})}}, 1).at(0).value);
  CHECK_FALSE(reduce_custom({{number_of(MetricReduction::Rate, {{3, 1}})}}, 0).at(0).value);
}

TEST_CASE("the error names the metric and both ranks") {
  const auto sum = number_of(MetricReduction::Sum, {{1, 1}});
  const auto mean = number_of(MetricReduction::Mean, {{1, 1}});
  CHECK_THROWS_WITH(reduce_custom({{sum}, {sum}, {}}, 1),
                    Catch::StartsWith("metric \"m\" was logged on rank 0 but not on rank 2"));
  CHECK_THROWS_WITH(reduce_custom({{}, {sum}}, 1),
                    Catch::StartsWith("metric \"m\" was logged on rank 1 but not on rank 0"));
  CHECK_THROWS_WITH(reduce_custom({{sum}, {mean}}, 1),
                    "metric \"m\" has reduction Sum on rank 0 but Mean on rank 1");
  CHECK_THROWS_AS(reduce_custom({{sum}, {}}, 1), ddp::MismatchError);
}
