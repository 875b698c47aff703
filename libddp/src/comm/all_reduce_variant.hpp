// SPDX-License-Identifier: Apache-2.0
// Chooses how an all-reduce is passed to NCCL.
//
// NCCL uses its symmetric kernels exactly for sums of floats inside a registered window. A mean, or
// a sum written as "multiply by 1, then sum", uses the ring. So one communicator offers both:
// symmetric kernels with few thread blocks, the ring with many.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "comm/all_reduce_table.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

enum class AllReduceVariant {
  AsCalled,
  SumThenScale,       ///< symmetric kernels for a mean: a sum, then a kernel that divides
  ScaleByOneThenSum,  ///< the ring for a sum inside a window
};

struct AllReduceCall {
  ReduceOp op = ReduceOp::Sum;
  c10::ScalarType dtype = c10::kFloat;
  size_t num_bytes = 0;
  bool overlapped = false;
};

/// Whether NCCL has symmetric kernels for the call, so that a window matters.
bool has_symmetric_kernels(const AllReduceCall& call);

/// `in_window`: has_symmetric_kernels() is true and the memory lies in one window.
/// NcclAlgorithm::Auto follows `table`.
AllReduceVariant choose_variant(const AllReduceCall& call, bool in_window, NcclAlgorithm algorithm,
                                const AllReduceTable& table);

}  // namespace ddp::detail
