// SPDX-License-Identifier: Apache-2.0
// Assigns to each rank the part of every bucket that it updates (ZeRO-1).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ddp/core/state_dict.hpp"
#include "reduce/buckets/gradient_arena.hpp"

namespace ddp::detail {

/// A parameter's elements in memory order, 1-D, sharing its memory; unknown to autograd.
at::Tensor flat_memory(const at::Tensor& parameter);

/// This rank's part of each gradient, 1-D: a tensor, possibly without elements, for every parameter
/// whose .grad is defined. So other ranks have as many. The padding between gradients is left out:
/// a backward may leave NaN there.
std::vector<at::Tensor> own_gradients(const GradientArena& gradients,
                                      const Communicator& communicator);

/// The part of one parameter inside this rank's part of its bucket.
struct ZeroPiece {
  size_t parameter = 0;  ///< index into the reducer's parameters
  int64_t begin = 0;     ///< first element, in the parameter's memory order
  int64_t offset = 0;    ///< of that element in the rank's part of the bucket
  at::Tensor leaf;       ///< 1-D view of the parameter's memory
  at::Tensor gradient;   ///< 1-D view of the bucket, same elements
};

/// A bucket of parameters. Its memory holds gradients from backward to the update, and then the
/// weights sent to the other ranks.
struct ZeroBucket {
  CollectiveLabel label;  ///< of the weights
  std::vector<size_t> parameters;
  std::vector<int64_t> offsets;    ///< per parameter, in elements
  std::vector<at::Tensor> leaves;  ///< 1-D, of the parameters
  std::vector<ZeroPiece> pieces;
  at::Tensor buffer;         ///< of gradients
  at::Tensor shard;          ///< this rank's part of `buffer`
  at::Tensor weights;        ///< the bucket's memory in the leaves' dtype, at the same offsets
  at::Tensor weights_shard;  ///< this rank's part of `weights`
};

/// In layout order.
std::vector<ZeroBucket> shard_buckets(const GradientArena& gradients,
                                      const Communicator& communicator);

}  // namespace ddp::detail
