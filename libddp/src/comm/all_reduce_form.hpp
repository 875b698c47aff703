// SPDX-License-Identifier: Apache-2.0
// Chooses the form in which an all-reduce is passed to NCCL.
//
// NCCL uses its symmetric kernels exactly for sums of floats inside a registered window. A mean, or
// a sum written as "multiply by 1, then sum", uses the ring. So one communicator offers both:
// symmetric kernels with few thread blocks, the ring with many.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>

#include "comm/all_reduce_table.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

enum class AllReduceForm {
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

/// Whether a window changes the form: NCCL has symmetric kernels for sums of some dtypes only.
bool depends_on_window(const AllReduceCall& call);

/// For a call with `in_window`: depends_on_window() and its memory lies in one window. `algorithm`
/// is CommunicatorOptions::nccl_algorithm; "auto" follows `table`.
AllReduceForm choose_form(const AllReduceCall& call, bool in_window, const std::string& algorithm,
                          const AllReduceTable& table);

}  // namespace ddp::detail
