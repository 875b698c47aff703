// SPDX-License-Identifier: Apache-2.0
// A metric that a program named, on one rank and over all ranks. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ddp/train/custom_metrics.hpp"

namespace ddp::detail {

struct CustomNumber {
  std::string name;
  MetricReduction reduction = MetricReduction::Mean;
  double value = 0;        ///< a mean's sum of values times weights
  double weight = 0;       ///< the sum of weights
  int64_t count = 0;       ///< of values with a weight above 0
  bool is_logged = false;  ///< also without a value

  friend auto message_fields(CustomNumber& n) {
    return std::tie(n.name, n.reduction, n.value, n.weight, n.count, n.is_logged);
  }
  bool is_valid() const { return reduction <= MetricReduction::Rate && count >= 0; }
  std::string column() const {
    return name + (reduction == MetricReduction::Rate ? "_per_second" : "");
  }

  void clear();
  void add(double number, double number_weight);
  /// Merges a total of several values: a sum (of products with weights), minimum or maximum.
  void combine(double total);
};

/// A metric over all ranks; no value: none was logged.
struct CustomResult {
  std::string name;
  bool is_rate = false;
  std::optional<double> value;

  std::string column() const { return name + (is_rate ? "_per_second" : ""); }
};

/// Throws MismatchError that names the first metric which not all ranks logged in the same way.
/// Ranks without a value count as ranks that logged it.
std::vector<CustomResult> reduce_custom(const std::vector<std::vector<CustomNumber>>& ranks,
                                        double seconds);

}  // namespace ddp::detail
