// SPDX-License-Identifier: Apache-2.0
// Data of the communicator tests. They differ between ranks, and all results are exact: small
// integers, and means over 1, 2 or 4 ranks.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "support/multi_rank_main.hpp"

namespace communicator_tests {

using ddp::ReduceOp;

inline ddp::Communicator& comm() {
  return *ddp::test::context().communicator();
}

inline const std::vector<at::ScalarType> kDtypes = {
    at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
    at::kShort, at::kInt,    at::kLong, at::kByte,     at::kBool};

// Input of rank `rank`: all results stay exact in float16 and bfloat16 (integers up to 200).
inline at::Tensor data_of(int rank, int64_t n, at::ScalarType dtype, ReduceOp op = ReduceOp::Sum) {
  const auto i = at::arange(n, at::kLong);
  at::Tensor values;
  if (dtype == at::kBool) {
    values = at::remainder(i + rank, 3).eq(0);
  } else if (op == ReduceOp::Product) {
    values = at::remainder(i + rank, 2) + 1;
  } else if (op == ReduceOp::Min || op == ReduceOp::Max) {
    values = at::remainder(i * 7 + rank * 3, 11) - (dtype == at::kByte ? 0 : 5);
  } else {
    values = (at::remainder(i, 5) + 1) * (rank + 1);
  }
  return values.to(dtype);
}

// The result of one process with all ranks' data.
inline at::Tensor reference(int64_t n, at::ScalarType dtype, ReduceOp op, int world_size) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world_size; ++rank) {
    all.push_back(data_of(rank, n, dtype, op).to(at::kDouble));
  }
  const auto stacked = at::stack(all);
  at::Tensor result;
  switch (op) {
    case ReduceOp::Sum:
      result = stacked.sum(0);
      break;
    case ReduceOp::Avg:
      result = stacked.mean(0);
      break;
    case ReduceOp::Min:
      result = stacked.amin(0);
      break;
    case ReduceOp::Max:
      result = stacked.amax(0);
      break;
    case ReduceOp::Product:
      result = stacked.prod(0);
      break;
  }
  return result.to(dtype);  // bool: "or" for sum and max, "and" for product and min
}

inline at::Tensor here(const at::Tensor& tensor) {
  return tensor.to(comm().device(), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace communicator_tests
