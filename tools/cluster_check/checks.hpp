// SPDX-License-Identifier: Apache-2.0
// The list of checks that can have a threshold.
#pragma once

#include <string>
#include <vector>

namespace cluster_check {

enum class Limit { Min, Max };

struct Check {
  std::string group;
  std::string name;
  Limit limit;  ///< whether the threshold is the smallest or the largest good value
  std::string unit;
  std::string doc;
  /// For --write-thresholds: the threshold is the worst value of the run, moved this share to the
  /// bad side. Negative: a fixed requirement that a run does not change.
  double margin;
};

const std::vector<Check>& checks();

/// nullptr if no check is called so.
const Check* find_check(const std::string& group, const std::string& name);

/// "gemm_bf16_8192": the name of a matrix product's row.
std::string gemm_name(const std::string& dtype, long size);

}  // namespace cluster_check
