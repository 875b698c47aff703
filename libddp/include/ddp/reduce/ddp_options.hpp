// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/taken_mark.hpp"

namespace ddp {

/// When rank 0's buffers (BatchNorm's running statistics) are sent to the others.
enum class BroadcastBuffers {
  EachForward,  ///< before every forward in training mode that follows a synchronised one
  BeforeEval,   ///< when the wrapper's eval() is called
  Off,
};

inline constexpr NumberOrAuto kAutoBuckets = std::nullopt;  ///< ddp.bucket_cap_mb=auto

/// The settings of DistributedDataParallel; names and defaults are PyTorch's.
struct DdpOptions {
  /// kAutoBuckets: chosen from times measured in the first backwards.
  NumberOrAuto bucket_cap_mb = 25;
  double first_bucket_mb = 0;
  bool find_unused_parameters = false;
  bool static_graph = false;
  BroadcastBuffers broadcast_buffers = BroadcastBuffers::EachForward;
  bool init_sync = true;
  std::vector<std::string> parameters_to_ignore{};
  std::string comm_hook = "none";
  int64_t powersgd_rank = 1;
  int64_t powersgd_start_step = 1000;
  bool fp32_grads = true;
  detail::TakenMark taken{};  ///< not a setting: reports to ddp::Config that these options are used
};
void describe_fields(DdpOptions& options, FieldVisitor& visitor);

inline bool chooses_buckets(const DdpOptions& options) {
  return options.bucket_cap_mb == kAutoBuckets;
}

/// The bucket limits in bytes: [first, cap].
std::vector<int64_t> bucket_limits_bytes(const DdpOptions& options);

}  // namespace ddp
