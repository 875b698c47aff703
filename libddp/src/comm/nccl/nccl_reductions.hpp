// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include "comm/nccl/nccl_handle.hpp"
#include "comm/nccl/nccl_launch.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// The reductions of one communicator. The caller has checked the arguments.
class NcclReductions {
 public:
  /// `handle` and `launcher` outlive this.
  NcclReductions(NcclHandle& handle, NcclLauncher& launcher)
      : handle_(handle), launcher_(launcher) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op);
  /// Enqueues one that is neither waited for nor counted. Call it with the launcher's lock.
  void enqueue_all_reduce(const at::Tensor& tensor, ReduceOp op);
  /// `receives`: this rank is the root.
  WorkPtr reduce(const at::Tensor& tensor, int root, bool receives, ReduceOp op);
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);

 private:
  WorkPtr reduce_int16(const char* name, const at::Tensor& output, const at::Tensor& input,
                       ReduceOp op);

  NcclHandle& handle_;
  NcclLauncher& launcher_;
};

}  // namespace ddp::detail
