// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <memory>

#include "comm/copy_all_reduce.hpp"
#include "comm/nccl_handle.hpp"
#include "comm/nccl_launch.hpp"
#include "comm/nccl_memory.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// The reductions of one communicator. The caller has checked the arguments.
class NcclReductions {
 public:
  /// `handle` and `launcher` outlive this. `memory` is null if windows are not requested or not
  /// available.
  NcclReductions(NcclHandle& handle, NcclLauncher& launcher, std::shared_ptr<NcclMemory> memory);

  /// `overlapped`: see Communicator::all_reduce_overlapped. Then tensors of at least 1 MiB in a
  /// window are reduced by copies. NCCL reduces all others.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, bool overlapped);
  /// Enqueues one that is not overlapped, neither waited for nor counted. Call it with the
  /// launcher's lock.
  void enqueue_all_reduce(const at::Tensor& tensor, ReduceOp op);
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);
  /// Memory in which all_reduce() copies. Collective, outside of groups and captures. Needs a
  /// `memory`.
  at::Tensor allocate(int64_t num_bytes);
  /// See CopyAllReduce.
  void release() const {
    if (copies_ != nullptr) {
      copies_->release();
    }
  }

 private:
  ncclResult_t call_all_reduce(const at::Tensor& tensor, ReduceOp op, bool overlapped,
                               ncclComm_t comm, cudaStream_t stream);
  WorkPtr reduce_int16(const char* name, const at::Tensor& output, const at::Tensor& input,
                       ReduceOp op);

  NcclHandle& handle_;
  NcclLauncher& launcher_;
  const std::shared_ptr<NcclMemory> memory_;
  at::Tensor slots_, flags_;               // what copies_ uses
  std::unique_ptr<CopyAllReduce> copies_;  // since the first allocate(), if NCCL maps windows
};

}  // namespace ddp::detail
