// SPDX-License-Identifier: Apache-2.0
// Where to cut the gradients into buckets, from when they are ready and what a reduction costs: a
// pure function behind ddp.bucket_cap_mb=auto. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ddp::detail {

/// A gradient in the order in which they become ready.
struct ReadyGradient {
  int64_t num_bytes = 0;
  double ready_us = 0;  ///< since the backward began
};

struct BucketChoice {
  std::vector<int> cuts;  ///< numbers of gradients before each cut, ascending; the last is all
  double exposed_us = 0;  ///< expected time between the last gradient and the last reduction's end

  /// {"cuts": […], "exposed_us": …, "gradients": n, "bytes": total}
  std::string to_json(const std::vector<int64_t>& gradient_bytes) const;
  /// Nothing where the text was made for other gradients. Throws ReadError where it is damaged.
  static std::optional<BucketChoice> from_json(const std::string& json,
                                               const std::vector<int64_t>& gradient_bytes);
};

/// Reductions run one after the other, each no earlier than its last gradient. Of all cuts whose
/// reductions end within `tolerance_us` of the earliest possible end, the fewest buckets.
/// `reduction_us(bytes, is_last)` is the time of one reduction; only the last one can be exposed.
BucketChoice choose_buckets(const std::vector<ReadyGradient>& gradients,
                            const std::function<double(int64_t, bool)>& reduction_us,
                            double tolerance_us);

/// Expected time between the last gradient and the end of the last reduction for given cuts.
double exposed_us(const std::vector<ReadyGradient>& gradients, const std::vector<int>& cuts,
                  const std::function<double(int64_t, bool)>& reduction_us);

}  // namespace ddp::detail
