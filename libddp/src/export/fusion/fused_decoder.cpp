// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "ddp/ops/decoder.hpp"
#include "export/fusion/fused_conditions.hpp"
#include "export/fusion/fused_functions.hpp"

namespace ddp::detail::fused {

void swiglu(Stack& stack) {
  const auto gate = stack[0].toTensor(), up = tensor_of(stack[1]);
  const bool gate_first = stack[2].toBool();
  if (gate.is_cuda() && gate.dim() > 0 && is_alike(gate, up)) {
    stack = {ops::swiglu(gate, up)};
  } else {
    const auto active = at::silu(gate);
    stack = {gate_first ? active * up : up * active};
  }
}

void apply_rotary(Stack& stack) {
  const auto x = stack[0].toTensor(), cos = tensor_of(stack[1]), sin = tensor_of(stack[2]);
  const int64_t dim = stack[3].toInt(), half = stack[4].toInt();
  if (x.is_cuda() && (dim == -1 || dim == x.dim() - 1) && x.size(-1) == 2 * half) {
    stack = {ops::apply_rotary(x, cos, sin)};
    return;
  }
  const auto straight = x * cos;
  const auto first = x.slice(dim, 0, half), second = x.slice(dim, half);
  stack = {straight + at::cat({-second, first}, -1) * sin};
}

}  // namespace ddp::detail::fused
