// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_reduce_ops.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "comm/mpi_internal.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

struct SumOp {
  static float apply(float a, float b) { return a + b; }
};
struct MinOp {
  static float apply(float a, float b) { return b < a ? b : a; }
};
struct MaxOp {
  static float apply(float a, float b) { return b > a ? b : a; }
};
struct ProductOp {
  static float apply(float a, float b) { return a * b; }
};

template <typename T, typename Op>
void reduce_pairs(void* in, void* in_out, int* length, MPI_Datatype*) {
  const auto* a = static_cast<const T*>(in);
  auto* b = static_cast<T*>(in_out);
  for (int i = 0; i < *length; ++i) {
    b[i] = static_cast<T>(Op::apply(static_cast<float>(a[i]), static_cast<float>(b[i])));
  }
}

template <typename T>
void create_ops(MPI_Op* ops) {
  const auto create = [](MPI_User_function* function, MPI_Op* op) {
    check_mpi(MPI_Op_create(function, /*commute=*/1, op), "MPI_Op_create");
  };
  create(reduce_pairs<T, SumOp>, &ops[0]);
  create(reduce_pairs<T, MinOp>, &ops[1]);
  create(reduce_pairs<T, MaxOp>, &ops[2]);
  create(reduce_pairs<T, ProductOp>, &ops[3]);
}

int index_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return 0;
    case ReduceOp::Min:
      return 1;
    case ReduceOp::Max:
      return 2;
    case ReduceOp::Product:
      return 3;
  }
  throw InternalError("unknown ReduceOp");
}

template <typename T, typename Math>
void divide_typed(void* data, int64_t num_elements, int divisor) {
  auto* values = static_cast<T*>(data);
  const auto by = static_cast<Math>(divisor);
  for (int64_t i = 0; i < num_elements; ++i) {
    values[i] = static_cast<T>(static_cast<Math>(values[i]) / by);
  }
}

}  // namespace

MpiReduceOps::MpiReduceOps() {
  create_ops<c10::Half>(half_);
  create_ops<c10::BFloat16>(bfloat16_);
}

MPI_Datatype MpiReduceOps::datatype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return MPI_FLOAT;
    case c10::kDouble:
      return MPI_DOUBLE;
    case c10::kHalf:
    case c10::kBFloat16:
      return MPI_UINT16_T;
    case c10::kChar:
      return MPI_INT8_T;
    case c10::kShort:
      return MPI_INT16_T;
    case c10::kInt:
      return MPI_INT32_T;
    case c10::kLong:
      return MPI_INT64_T;
    case c10::kByte:
    case c10::kBool:
      return MPI_UINT8_T;
    default:
      throw InternalError("a dtype without an MPI datatype passed the argument checks");
  }
}

MPI_Op MpiReduceOps::op(c10::ScalarType dtype, ReduceOp op) const {
  const int index = index_of(op);
  if (dtype == c10::kHalf) {
    return half_[index];
  }
  if (dtype == c10::kBFloat16) {
    return bfloat16_[index];
  }
  if (dtype == c10::kBool) {
    return op == ReduceOp::Sum || op == ReduceOp::Max ? MPI_LOR : MPI_LAND;
  }
  switch (op) {
    case ReduceOp::Min:
      return MPI_MIN;
    case ReduceOp::Max:
      return MPI_MAX;
    case ReduceOp::Product:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

void divide_by(void* data, int64_t num_elements, c10::ScalarType dtype, int divisor) {
  switch (dtype) {
    case c10::kFloat:
      return divide_typed<float, float>(data, num_elements, divisor);
    case c10::kDouble:
      return divide_typed<double, double>(data, num_elements, divisor);
    case c10::kHalf:
      return divide_typed<c10::Half, float>(data, num_elements, divisor);
    case c10::kBFloat16:
      return divide_typed<c10::BFloat16, float>(data, num_elements, divisor);
    default:
      throw InternalError("avg of a dtype that is not floating passed the argument checks");
  }
}

}  // namespace ddp::detail
