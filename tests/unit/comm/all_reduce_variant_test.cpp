// SPDX-License-Identifier: Apache-2.0
#include "comm/all_reduce_variant.hpp"

#include "support/catch.hpp"

namespace {

using ddp::AllReduceTable;
using ddp::NcclAlgorithm;
using ddp::ReduceOp;
using ddp::detail::AllReduceCall;
using ddp::detail::AllReduceVariant;
using ddp::detail::choose_variant;
using ddp::detail::has_symmetric_kernels;

// Symmetric is faster by 3 us at 1000 bytes; ring is faster at 4000 bytes and above.
AllReduceTable table() {
  return AllReduceTable({{1000, 10, 7}, {4000, 16, 20}, {8000, 20, 40}});
}

AllReduceVariant variant_in_window(const AllReduceCall& call,
                                   NcclAlgorithm algorithm = NcclAlgorithm::Auto) {
  return choose_variant(call, /*in_window=*/true, algorithm, table());
}

}  // namespace

TEST_CASE("windows matter for sums and means of floats up to 32 bits") {
  for (const auto dtype : {c10::kFloat, c10::kHalf, c10::kBFloat16}) {
    CHECK(has_symmetric_kernels({ReduceOp::Sum, dtype}));
    CHECK(has_symmetric_kernels({ReduceOp::Avg, dtype}));
    CHECK_FALSE(has_symmetric_kernels({ReduceOp::Max, dtype}));
    CHECK_FALSE(has_symmetric_kernels({ReduceOp::Product, dtype}));
  }
  for (const auto dtype : {c10::kDouble, c10::kInt, c10::kLong, c10::kBool}) {
    CHECK_FALSE(has_symmetric_kernels({ReduceOp::Sum, dtype}));
  }
}

TEST_CASE("outside windows NCCL gets the operation as it was called") {
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
    CHECK(choose_variant({op, c10::kFloat, 1000}, /*in_window=*/false, NcclAlgorithm::Symmetric,
                         table()) == AllReduceVariant::AsCalled);
  }
}

TEST_CASE("nccl_algorithm=symmetric sums in the window and divides a mean afterwards") {
  CHECK(variant_in_window({ReduceOp::Sum, c10::kFloat, 8000}, NcclAlgorithm::Symmetric) ==
        AllReduceVariant::AsCalled);
  CHECK(variant_in_window({ReduceOp::Avg, c10::kFloat, 8000}, NcclAlgorithm::Symmetric) ==
        AllReduceVariant::SumThenScale);
  CHECK(variant_in_window({ReduceOp::Avg, c10::kBFloat16, 8000}, NcclAlgorithm::Symmetric) ==
        AllReduceVariant::SumThenScale);
}

TEST_CASE("a mean of fp16 never sums first, because the sum may be infinite") {
  CHECK(variant_in_window({ReduceOp::Avg, c10::kHalf, 1000}, NcclAlgorithm::Symmetric) ==
        AllReduceVariant::AsCalled);
  CHECK(variant_in_window({ReduceOp::Avg, c10::kHalf, 1000}, NcclAlgorithm::Auto) ==
        AllReduceVariant::AsCalled);
  CHECK(variant_in_window({ReduceOp::Sum, c10::kHalf, 1000}, NcclAlgorithm::Symmetric) ==
        AllReduceVariant::AsCalled);
}

TEST_CASE("auto follows the table") {
  CHECK(variant_in_window({ReduceOp::Sum, c10::kFloat, 1000}) == AllReduceVariant::AsCalled);
  CHECK(variant_in_window({ReduceOp::Sum, c10::kFloat, 8000}) ==
        AllReduceVariant::ScaleByOneThenSum);
  CHECK(variant_in_window({ReduceOp::Avg, c10::kFloat, 1000}) == AllReduceVariant::SumThenScale);
  CHECK(variant_in_window({ReduceOp::Avg, c10::kFloat, 8000}) == AllReduceVariant::AsCalled);
  // Few thread blocks may take longer if the caller computes meanwhile.
  CHECK(variant_in_window({ReduceOp::Sum, c10::kFloat, 4000}) ==
        AllReduceVariant::ScaleByOneThenSum);
  CHECK(variant_in_window({ReduceOp::Sum, c10::kFloat, 4000, /*overlapped=*/true}) ==
        AllReduceVariant::AsCalled);
}

TEST_CASE("the kernel behind a mean counts") {
  const AllReduceTable close({{1000, 10, 9}});  // the division takes 2 us
  CHECK(choose_variant({ReduceOp::Sum, c10::kFloat, 1000}, true, NcclAlgorithm::Auto, close) ==
        AllReduceVariant::AsCalled);
  CHECK(choose_variant({ReduceOp::Avg, c10::kFloat, 1000}, true, NcclAlgorithm::Auto, close) ==
        AllReduceVariant::AsCalled);
  CHECK(choose_variant({ReduceOp::Avg, c10::kFloat, 1000}, true, NcclAlgorithm::Auto,
                       AllReduceTable({{1000, 12, 9}})) == AllReduceVariant::SumThenScale);
}

TEST_CASE("without a table windows use the ring") {
  CHECK(choose_variant({ReduceOp::Sum, c10::kFloat, 1000}, true, NcclAlgorithm::Auto, {}) ==
        AllReduceVariant::ScaleByOneThenSum);
  CHECK(choose_variant({ReduceOp::Avg, c10::kFloat, 1000}, true, NcclAlgorithm::Auto, {}) ==
        AllReduceVariant::AsCalled);
}
