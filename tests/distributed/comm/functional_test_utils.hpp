// SPDX-License-Identifier: Apache-2.0
// One process that does what an exchange between all ranks does.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "distributed/comm/row_sizes.hpp"
#include "distributed/ddp_test_utils.hpp"

namespace ddp::test {

using torch::Tensor;
using Tensors = std::vector<Tensor>;  // by rank

// sizes[r] = function(r).
inline Sizes for_ranks(const std::function<int64_t(int)>& function) {
  Sizes sizes;
  for (int r = 0; r < world(); ++r) {
    sizes.push_back(function(r));
  }
  return sizes;
}

inline Tensor sum_of(const Tensors& inputs) {
  auto sum = inputs[0];
  for (size_t r = 1; r < inputs.size(); ++r) {
    sum = sum + inputs[r];
  }
  return sum;
}

// Part `of` of the rows, cut into `sizes`.
inline Tensor part(const Tensor& rows, const Sizes& sizes, int of) {
  return rows.split_with_sizes(sizes)[static_cast<size_t>(of)];
}

inline Tensors exchanged(const Tensors& inputs, const std::function<Sizes(int)>& sizes_of) {
  Tensors outputs;
  for (int receiver = 0; receiver < world(); ++receiver) {
    Tensors parts;
    for (int sender = 0; sender < world(); ++sender) {
      parts.push_back(part(inputs[static_cast<size_t>(sender)], sizes_of(sender), receiver));
    }
    outputs.push_back(torch::cat(parts));
  }
  return outputs;
}

}  // namespace ddp::test
