// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <map>
#include <memory>
#include <string>

#include "comm/all_reduce_table.hpp"
#include "comm/nccl_handle.hpp"
#include "comm/nccl_launch.hpp"
#include "comm/nccl_memory.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// The reductions of one communicator. Passes each operation to NCCL in the fastest variant that
/// gives the right values. The caller has checked the arguments.
class NcclReductions {
 public:
  /// `handle` and `launcher` outlive this.
  /// `memory` is null if windows are not requested or not available.
  NcclReductions(NcclHandle& handle, NcclLauncher& launcher, std::shared_ptr<NcclMemory> memory,
                 NcclAlgorithm algorithm);

  /// `table` has the times that NcclAlgorithm::Auto follows. It may be empty.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, bool overlapped,
                     const AllReduceTable& table);
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);
  /// Returns "multiply by 1, then sum", which is exact and which symmetric kernels do not support.
  /// Call it with the launcher's lock.
  ncclRedOp_t ring_sum(ncclDataType_t dtype);

 private:
  WorkPtr reduce_int16(const char* name, const at::Tensor& output, const at::Tensor& input,
                       ReduceOp op);

  NcclHandle& handle_;
  NcclLauncher& launcher_;
  const std::shared_ptr<NcclMemory> memory_;
  const NcclAlgorithm algorithm_;
  std::map<ncclDataType_t, ncclRedOp_t> ring_sums_;  // guarded by the launcher's lock
};

}  // namespace ddp::detail
