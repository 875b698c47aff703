// SPDX-License-Identifier: Apache-2.0
#include "comm/all_reduce_form.hpp"

#include "support/catch.hpp"

namespace {

using ddp::AllReduceTable;
using ddp::ReduceOp;
using ddp::detail::AllReduceCall;
using ddp::detail::AllReduceForm;
using ddp::detail::choose_form;
using ddp::detail::depends_on_window;

// Symmetric is faster by 3 us at 1000 bytes; ring is faster at 4000 bytes and above.
AllReduceTable table() {
  return AllReduceTable({{1000, 10, 7}, {4000, 16, 20}, {8000, 20, 40}});
}

AllReduceForm form_in_window(const AllReduceCall& call, const std::string& algorithm = "auto") {
  return choose_form(call, /*in_window=*/true, algorithm, table());
}

}  // namespace

TEST_CASE("windows matter for sums and means of floats up to 32 bits") {
  for (const auto dtype : {c10::kFloat, c10::kHalf, c10::kBFloat16}) {
    CHECK(depends_on_window({ReduceOp::Sum, dtype}));
    CHECK(depends_on_window({ReduceOp::Avg, dtype}));
    CHECK_FALSE(depends_on_window({ReduceOp::Max, dtype}));
    CHECK_FALSE(depends_on_window({ReduceOp::Product, dtype}));
  }
  for (const auto dtype : {c10::kDouble, c10::kInt, c10::kLong, c10::kBool}) {
    CHECK_FALSE(depends_on_window({ReduceOp::Sum, dtype}));
  }
}

TEST_CASE("outside windows NCCL gets the operation as it was called") {
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
    CHECK(choose_form({op, c10::kFloat, 1000}, /*in_window=*/false, "symmetric", table()) ==
          AllReduceForm::AsCalled);
  }
}

TEST_CASE("nccl_algorithm=symmetric sums in the window and divides a mean afterwards") {
  CHECK(form_in_window({ReduceOp::Sum, c10::kFloat, 8000}, "symmetric") == AllReduceForm::AsCalled);
  CHECK(form_in_window({ReduceOp::Avg, c10::kFloat, 8000}, "symmetric") ==
        AllReduceForm::SumThenScale);
  CHECK(form_in_window({ReduceOp::Avg, c10::kBFloat16, 8000}, "symmetric") ==
        AllReduceForm::SumThenScale);
}

TEST_CASE("a mean of fp16 never sums first, because the sum may be infinite") {
  CHECK(form_in_window({ReduceOp::Avg, c10::kHalf, 1000}, "symmetric") == AllReduceForm::AsCalled);
  CHECK(form_in_window({ReduceOp::Avg, c10::kHalf, 1000}, "auto") == AllReduceForm::AsCalled);
  CHECK(form_in_window({ReduceOp::Sum, c10::kHalf, 1000}, "symmetric") == AllReduceForm::AsCalled);
}

TEST_CASE("auto follows the table") {
  CHECK(form_in_window({ReduceOp::Sum, c10::kFloat, 1000}) == AllReduceForm::AsCalled);
  CHECK(form_in_window({ReduceOp::Sum, c10::kFloat, 8000}) == AllReduceForm::ScaleByOneThenSum);
  CHECK(form_in_window({ReduceOp::Avg, c10::kFloat, 1000}) == AllReduceForm::SumThenScale);
  CHECK(form_in_window({ReduceOp::Avg, c10::kFloat, 8000}) == AllReduceForm::AsCalled);
  // Few thread blocks may take longer if the caller computes meanwhile.
  CHECK(form_in_window({ReduceOp::Sum, c10::kFloat, 4000}) == AllReduceForm::ScaleByOneThenSum);
  CHECK(form_in_window({ReduceOp::Sum, c10::kFloat, 4000, /*overlapped=*/true}) ==
        AllReduceForm::AsCalled);
}

TEST_CASE("the kernel behind a mean counts") {
  const AllReduceTable close({{1000, 10, 9}});  // the division takes 2 us
  CHECK(choose_form({ReduceOp::Sum, c10::kFloat, 1000}, true, "auto", close) ==
        AllReduceForm::AsCalled);
  CHECK(choose_form({ReduceOp::Avg, c10::kFloat, 1000}, true, "auto", close) ==
        AllReduceForm::AsCalled);
  CHECK(choose_form({ReduceOp::Avg, c10::kFloat, 1000}, true, "auto",
                    AllReduceTable({{1000, 12, 9}})) == AllReduceForm::SumThenScale);
}

TEST_CASE("without a table windows use the ring") {
  CHECK(choose_form({ReduceOp::Sum, c10::kFloat, 1000}, true, "auto", {}) ==
        AllReduceForm::ScaleByOneThenSum);
  CHECK(choose_form({ReduceOp::Avg, c10::kFloat, 1000}, true, "auto", {}) ==
        AllReduceForm::AsCalled);
}
