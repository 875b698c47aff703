// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <vector>

#include "export/fusion/fused_conditions.hpp"
#include "export/fusion/fused_functions.hpp"
#include "ops/layout/layout.hpp"

namespace ddp::detail::fused {

void reshape(Stack& stack) {
  stack = {ops::detail::reshape_rows(stack[0].toTensor(), integers_at(stack[1]))};
}

void contiguous(Stack& stack) {
  stack = {ops::detail::contiguous_rows(stack[0].toTensor())};
}

void roll(Stack& stack) {
  stack = {
      ops::detail::roll_rows(stack[0].toTensor(), integers_at(stack[1]), integers_at(stack[2]))};
}

void pad_nothing(Stack& stack) {
  const auto x = stack[0].toTensor();
  stack = {x.is_cuda() ? x : at::constant_pad_nd(x, integers_at(stack[1]))};
}

void matmul(Stack& stack) {
  const auto a = tensor_of(stack[0]), b = tensor_of(stack[1]);
  const auto factor = stack[2].toScalar();
  stack = {at::isFloatingType(a.scalar_type()) ? ops::detail::matmul_rows(a, b, factor.toDouble())
                                               : at::matmul(a * factor, b)};
}

}  // namespace ddp::detail::fused
