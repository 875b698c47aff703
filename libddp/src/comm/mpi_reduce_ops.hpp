// SPDX-License-Identifier: Apache-2.0
// MPI datatypes and reductions of LibTorch dtypes. Created and used on the MPI thread.
#pragma once

#include <c10/core/ScalarType.h>
#include <mpi.h>

#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// MPI has no float16 and bfloat16: they travel as 2-byte integers. Our own MPI_Op reduces each
/// pair in float32 and rounds once.
class MpiReduceOps {
 public:
  MpiReduceOps();
  ~MpiReduceOps() = default;  // the ops live until MPI_Finalize
  MpiReduceOps(const MpiReduceOps&) = delete;
  MpiReduceOps& operator=(const MpiReduceOps&) = delete;

  static MPI_Datatype datatype(c10::ScalarType dtype);
  /// Avg maps to Sum; divide_by() finishes it.
  MPI_Op op(c10::ScalarType dtype, ReduceOp op) const;

 private:
  MPI_Op half_[4];      // sum, min, max, product
  MPI_Op bfloat16_[4];  // the same
};

/// data[i] /= divisor, in float32 for the 2-byte types. Floating dtypes only.
void divide_by(void* data, int64_t num_elements, c10::ScalarType dtype, int divisor);

}  // namespace ddp::detail
