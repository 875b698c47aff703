// SPDX-License-Identifier: Apache-2.0
#include "comm/all_reduce_variant.hpp"

namespace ddp::detail {
namespace {

// The time of the kernel that turns a sum into a mean: its launch, then a read and a write.
double scale_us(size_t num_bytes) {
  constexpr double kLaunchUs = 2;
  constexpr double kBytesPerUs = 4.3e6;
  return kLaunchUs + 2 * static_cast<double>(num_bytes) / kBytesPerUs;
}

bool has_float_sum(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kHalf || dtype == c10::kBFloat16;
}

// NCCL's own mean divides before it adds. Symmetric kernels add first, and fp16 values with a
// finite mean may sum to infinity.
bool may_sum_first(c10::ScalarType dtype, ReduceOp op) {
  return op == ReduceOp::Sum || dtype != c10::kHalf;
}

AllReduceAlgorithm choose_algorithm(const AllReduceCall& call, NcclAlgorithm algorithm,
                                    const AllReduceTable& table) {
  if (algorithm == NcclAlgorithm::Symmetric) {
    return AllReduceAlgorithm::Symmetric;
  }
  return table.choose(static_cast<int64_t>(call.num_bytes), call.overlapped,
                      call.op == ReduceOp::Avg ? scale_us(call.num_bytes) : 0);
}

}  // namespace

bool has_symmetric_kernels(const AllReduceCall& call) {
  return (call.op == ReduceOp::Sum || call.op == ReduceOp::Avg) && has_float_sum(call.dtype);
}

AllReduceVariant choose_variant(const AllReduceCall& call, bool in_window, NcclAlgorithm algorithm,
                                const AllReduceTable& table) {
  if (!in_window) {
    return AllReduceVariant::AsCalled;
  }
  const bool symmetric = may_sum_first(call.dtype, call.op) &&
                         choose_algorithm(call, algorithm, table) == AllReduceAlgorithm::Symmetric;
  if (symmetric) {
    return call.op == ReduceOp::Avg ? AllReduceVariant::SumThenScale : AllReduceVariant::AsCalled;
  }
  return call.op == ReduceOp::Sum ? AllReduceVariant::ScaleByOneThenSum
                                  : AllReduceVariant::AsCalled;
}

}  // namespace ddp::detail
