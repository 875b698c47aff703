// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/custom_numbers.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double start_of(MetricReduction reduction) {
  return reduction == MetricReduction::Min   ? kInfinity
         : reduction == MetricReduction::Max ? -kInfinity
                                             : 0.0;
}

std::optional<double> result_of(const CustomNumber& total, double seconds) {
  if (total.count == 0) {
    return std::nullopt;
  }
  const auto ratio = [&](double divisor) {
    return divisor > 0 ? std::optional(total.value / divisor) : std::nullopt;
  };
  switch (total.reduction) {
    case MetricReduction::Mean:
      return ratio(total.weight);
    case MetricReduction::Rate:
      return ratio(seconds);
    default:
      return total.value;
  }
}

const char* name_of(MetricReduction reduction) {
  constexpr const char* kNames[] = {"Mean", "Sum", "Min", "Max", "Rate"};
  return kNames[static_cast<size_t>(reduction)];
}

/// The number of that name; null: none.
const CustomNumber* find(const std::vector<CustomNumber>& numbers, const std::string& name) {
  const auto found = std::find_if(numbers.begin(), numbers.end(),
                                  [&](const CustomNumber& number) { return number.name == name; });
  return found == numbers.end() ? nullptr : &*found;
}

void check_has_all(const std::vector<CustomNumber>& numbers, int rank,
                   const std::vector<CustomNumber>& wanted, int other) {
  for (const CustomNumber& number : wanted) {
    const CustomNumber* found = find(numbers, number.name);
    if (found == nullptr || (number.is_logged && !found->is_logged)) {
      throw MismatchError(concat("metric \"", number.name, "\" was logged on rank ", other,
                                 " but not on rank ", rank,
                                 "; fix: log it on all ranks, with weight 0 where there is none"));
    }
    if (found->reduction != number.reduction) {
      throw MismatchError(concat("metric \"", number.name, "\" has reduction ",
                                 name_of(number.reduction), " on rank ", other, " but ",
                                 name_of(found->reduction), " on rank ", rank));
    }
  }
}

}  // namespace

void CustomNumber::clear() {
  value = start_of(reduction);
  weight = 0;
  count = 0;
  is_logged = false;
}

void CustomNumber::add(double number, double number_weight) {
  const bool is_mean = reduction == MetricReduction::Mean;
  combine(is_mean ? number * number_weight : number);
  weight += number_weight;
  ++count;
}

void CustomNumber::combine(double total) {
  const bool is_nan = std::isnan(value) || std::isnan(total);
  switch (reduction) {
    case MetricReduction::Min:
      value = is_nan ? NAN : std::min(value, total);
      break;
    case MetricReduction::Max:
      value = is_nan ? NAN : std::max(value, total);
      break;
    default:
      value += total;
  }
}

std::vector<CustomResult> reduce_custom(const std::vector<std::vector<CustomNumber>>& ranks,
                                        double seconds) {
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    check_has_all(ranks[rank], static_cast<int>(rank), ranks[0], 0);
    check_has_all(ranks[0], 0, ranks[rank], static_cast<int>(rank));
  }
  std::vector<CustomResult> results;
  if (ranks.empty()) {
    return results;  // only rank 0 gathered
  }
  for (CustomNumber total : ranks[0]) {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      const CustomNumber& other = *find(ranks[rank], total.name);
      total.combine(other.value);
      total.weight += other.weight;
      total.count += other.count;
    }
    results.push_back({.name = total.name,
                       .is_rate = total.reduction == MetricReduction::Rate,
                       .value = result_of(total, seconds)});
  }
  return results;
}

}  // namespace ddp::detail
