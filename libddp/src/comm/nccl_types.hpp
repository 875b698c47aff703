// SPDX-License-Identifier: Apache-2.0
// Maps LibTorch dtypes and ddp operations to NCCL's.
#pragma once

#include <c10/core/ScalarType.h>
#include <nccl.h>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

// NCCL has no int16 and no bool: bool reduces as bytes of 0 and 1, int16 as int32.
inline ncclDataType_t to_nccl(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return ncclFloat32;
    case c10::kDouble:
      return ncclFloat64;
    case c10::kHalf:
      return ncclFloat16;
    case c10::kBFloat16:
      return ncclBfloat16;
    case c10::kChar:
      return ncclInt8;
    case c10::kInt:
      return ncclInt32;
    case c10::kLong:
      return ncclInt64;
    case c10::kByte:
    case c10::kBool:
      return ncclUint8;
    default:
      throw InternalError("a dtype without an NCCL datatype passed the argument checks");
  }
}

inline ncclRedOp_t to_nccl(ReduceOp op, c10::ScalarType dtype) {
  if (dtype == c10::kBool) {
    return op == ReduceOp::Sum || op == ReduceOp::Max ? ncclMax : ncclMin;
  }
  switch (op) {
    case ReduceOp::Sum:
      return ncclSum;
    case ReduceOp::Avg:
      return ncclAvg;
    case ReduceOp::Min:
      return ncclMin;
    case ReduceOp::Max:
      return ncclMax;
    case ReduceOp::Product:
      return ncclProd;
  }
  throw InternalError("unknown ReduceOp");
}

}  // namespace ddp::detail
