// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp {

inline bool chooses_buckets(const DdpOptions& options) {
  return options.bucket_cap_mb == kAutoBuckets;
}

/// The bucket limits in bytes: [first, cap].
std::vector<int64_t> bucket_limits_bytes(const DdpOptions& options);

}  // namespace ddp
