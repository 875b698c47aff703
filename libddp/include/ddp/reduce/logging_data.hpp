// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace ddp {

/// PyTorch's DDPLoggingData. Times are in milliseconds, averaged over the measured backwards (the
/// first 10, then every 100th); 0 before the first measurement.
struct DdpLoggingData {
  int64_t num_parameter_tensors = 0;          ///< trained parameters
  int64_t total_parameter_bytes = 0;          ///< of the trained parameters
  std::vector<int64_t> bucket_sizes;          ///< bytes, at construction
  std::vector<int64_t> rebuilt_bucket_sizes;  ///< bytes; empty before the rebuild
  std::vector<std::vector<int>> rebuilt_per_bucket_param_indices;  ///< parameters, in launch order
  std::vector<int> prev_iteration_grad_ready_order_indices;  ///< parameters, in the last backward
  bool has_rebuilt_buckets = false;                          ///< true after the one rebuild
  int64_t unused_parameter_size = 0;  ///< parameters without a local gradient in the last backward
  bool can_set_static_graph = false;  ///< the same parameters were unused in every backward so far
  int64_t num_synchronised_backwards = 0;  ///< so far
  double avg_forward_compute_time = 0;     ///< ms
  double avg_backward_compute_time = 0;    ///< ms
  double avg_backward_comm_time = 0;       ///< ms, from the first launch to the last result
  double avg_backward_compute_comm_overlap_time = 0;  ///< ms
};

}  // namespace ddp
