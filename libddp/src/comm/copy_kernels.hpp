// SPDX-License-Identifier: Apache-2.0
// Kernels of CopyAllReduce. Free of LibTorch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ops/kernel_types.hpp"

namespace ddp::detail {

/// Writes the addresses at which this GPU reaches a window (ncclWindow_t) of each rank to
/// `addresses`, device memory for one pointer per rank. Needs NCCL 2.28.9, before which windows had
/// other fields.
cudaError_t launch_peer_addresses(void* window, int world_size, void** addresses,
                                  cudaStream_t stream);

/// The parts of one sum. All addresses are multiples of 16 bytes.
struct PartSum {
  void* own = nullptr;          ///< this rank's part, replaced by the result
  const void* slots = nullptr;  ///< one slot per rank; this rank's is not read
  size_t slot_bytes = 0;
  size_t num_bytes = 0;  ///< of a part
  int rank = 0;
  int world_size = 1;
  float factor = 1;  ///< of the sum
};

/// Adds the parts in rank order in float, multiplies by the factor and rounds once. Not of UInt8.
cudaError_t launch_part_sum(const PartSum& sum, ops::detail::Element element, cudaStream_t stream);

}  // namespace ddp::detail
