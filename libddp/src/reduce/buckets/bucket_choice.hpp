// SPDX-License-Identifier: Apache-2.0
// Chooses where to cut the gradients into buckets, from their ready times and the cost of a
// reduction. This pure function implements ddp.bucket_cap_mb=auto. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ddp::detail {

/// A gradient. Gradients are listed in the order in which they become ready.
struct ReadyGradient {
  int64_t num_bytes = 0;
  double ready_us = 0;  ///< since the start of backward
};

struct BucketChoice {
  std::vector<int> cuts;  ///< numbers of gradients before each cut, ascending; the last is the
                          ///< number of all gradients
  double exposed_us = 0;  ///< expected time between the last gradient and the last reduction's end

  /// Writes {"cuts": […], "exposed_us": …, "gradients": n, "bytes": total}.
  std::string to_json(const std::vector<int64_t>& gradient_bytes) const;
  /// Returns nothing if `json` was made for other gradients. Throws ReadError if it is damaged.
  static std::optional<BucketChoice> from_json(const std::string& json,
                                               const std::vector<int64_t>& gradient_bytes);
};

/// Reductions run one after the other, each no earlier than its last gradient. Chooses the fewest
/// buckets among all cuts that end within `tolerance_us` of the earliest possible end.
/// `reduction_us(bytes, is_last)` is the time of one reduction; only the last one can be exposed.
BucketChoice choose_buckets(const std::vector<ReadyGradient>& gradients,
                            const std::function<double(int64_t, bool)>& reduction_us,
                            double tolerance_us);

/// Returns the expected time between the last gradient and the end of the last reduction.
double exposed_us(const std::vector<ReadyGradient>& gradients, const std::vector<int>& cuts,
                  const std::function<double(int64_t, bool)>& reduction_us);

}  // namespace ddp::detail
