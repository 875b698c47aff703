// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "export/fusion/fused_conditions.hpp"
#include "export/fusion/fused_functions.hpp"
#include "ops/layout/layout.hpp"

namespace ddp::detail::fused {
namespace {

at::Tensor joined_slices(const at::Tensor& x, int64_t first, int64_t second, bool first_fastest) {
  std::vector<at::Tensor> parts;
  for (int64_t part = 0; part < 4; ++part) {
    const int64_t fast = part % 2, slow = part / 2;
    parts.push_back(x.slice(first, first_fastest ? fast : slow, std::nullopt, 2)
                        .slice(second, first_fastest ? slow : fast, std::nullopt, 2));
  }
  return at::cat(parts, -1);
}

// One copy by rows, where slices are put into zeros and added in the backward.
at::Tensor blocks_behind_one_another(const at::Tensor& x, int64_t first, int64_t second,
                                     bool first_fastest) {
  auto shape = x.sizes().vec();
  auto split = shape;
  for (const int64_t dim : {std::max(first, second), std::min(first, second)}) {
    const auto at = static_cast<std::ptrdiff_t>(dim);
    shape[static_cast<std::size_t>(dim)] /= 2;
    split[static_cast<std::size_t>(dim)] /= 2;
    split.insert(split.begin() + at + 1, 2);
  }
  shape.back() *= 4;
  // The dimensions of size 2 that `split` has behind the halved ones.
  const int64_t of_first = first + 1 + (first > second ? 1 : 0);
  const int64_t of_second = second + 1 + (second > first ? 1 : 0);
  std::vector<int64_t> order;
  for (int64_t dim = 0; dim < std::ssize(split) - 1; ++dim) {
    if (dim != of_first && dim != of_second) {
      order.push_back(dim);
    }
  }
  order.push_back(first_fastest ? of_second : of_first);
  order.push_back(first_fastest ? of_first : of_second);
  order.push_back(std::ssize(split) - 1);
  // Blocks that follow each other in memory already would be a view, and cat makes a copy.
  const auto joined = ops::detail::reshape_rows(x.reshape(split).permute(order), shape);
  return joined.is_alias_of(x) ? joined.clone(at::MemoryFormat::Contiguous) : joined;
}

}  // namespace

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
  // The pad of a value with gaps has none, which a later view may need.
  const bool is_alike = x.is_cuda() && x.is_non_overlapping_and_dense();
  stack = {is_alike ? x : at::constant_pad_nd(x, integers_at(stack[1]))};
}

void matmul(Stack& stack) {
  const auto a = tensor_of(stack[0]), b = tensor_of(stack[1]);
  const auto factor = stack[2].toScalar();
  stack = {at::isFloatingType(a.scalar_type()) ? ops::detail::matmul_rows(a, b, factor.toDouble())
                                               : at::matmul(a * factor, b)};
}

void space_to_depth(Stack& stack) {
  const auto x = stack[0].toTensor();
  const auto first = stack[1].toInt(), second = stack[2].toInt();
  const bool first_fastest = stack[3].toBool();
  const bool fits = x.is_cuda() && std::max(first, second) < x.dim() - 1 &&
                    x.size(first) % 2 == 0 && x.size(second) % 2 == 0;
  stack = {fits ? blocks_behind_one_another(x, first, second, first_fastest)
                : joined_slices(x, first, second, first_fastest)};
}

}  // namespace ddp::detail::fused
