// SPDX-License-Identifier: Apache-2.0
// How ZeRO-1 cuts parameters: what of every bucket this rank updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ddp/reduce/named_parameter.hpp"
#include "reduce/gradient_arena.hpp"

namespace ddp::detail {

/// A parameter's elements in the order of its memory, 1-D, sharing it; unknown to autograd.
at::Tensor flat_memory(const at::Tensor& parameter);

/// The part of one parameter that lies in this rank's part of its bucket.
struct ZeroPiece {
  size_t parameter = 0;  ///< index into the reducer's parameters
  int64_t begin = 0;     ///< first element, in the order of the parameter's memory
  int64_t offset = 0;    ///< of that element in the rank's part of the bucket
  at::Tensor leaf;       ///< 1-D view of the parameter's memory
  at::Tensor gradient;   ///< 1-D view of the bucket, same elements
};

/// A bucket of parameters. Its memory holds gradients from backward to the update, and then the
/// weights on their way to the other ranks.
struct ZeroBucket {
  std::vector<size_t> parameters;
  std::vector<int64_t> offsets;    ///< of each parameter, in elements
  std::vector<at::Tensor> leaves;  ///< 1-D, of the parameters
  std::vector<ZeroPiece> pieces;
  at::Tensor buffer;         ///< of gradients
  at::Tensor shard;          ///< this rank's part of it
  at::Tensor weights;        ///< the bucket's memory in the leaves' dtype, at the same offsets
  at::Tensor weights_shard;  ///< this rank's part of it
};

/// In the order of the layout.
std::vector<ZeroBucket> cut_buckets(const GradientArena& gradients, const Communicator& communicator);

}  // namespace ddp::detail
