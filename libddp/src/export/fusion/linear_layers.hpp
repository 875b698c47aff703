// SPDX-License-Identifier: Apache-2.0
// Linear layers and the ends of residual branches, as parts of longer chains.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "export/fusion/fusion_graph.hpp"

namespace ddp::detail {

/// Nodes that a fused function runs as a layer.
struct LayerNodes {
  std::vector<std::size_t> nodes = {};  ///< ascending; none: the layer is a value
  Argument input = {}, weight = {}, bias = {}, sizes = {};  ///< None: not given
  bool transposed = false;

  /// The five of fused_functions.hpp, and what follows them.
  std::vector<NamedArgument> arguments(const std::vector<NamedArgument>& more = {}) const;
};

/// aten.linear, or aten.addmm as transformers' Conv1D calls it.
std::optional<LayerNodes> linear_layer(const FusionGraph& graph, std::size_t i);
/// The linear layer, optionally with a view of its result, that makes this value. Other nodes may
/// read the value, but not the product before the view.
std::optional<LayerNodes> layer_that_makes(const FusionGraph& graph, const Argument* value);
/// The same if the value has one reader.
std::optional<LayerNodes> private_layer(const FusionGraph& graph, const Argument* value);

/// Whether the layer is the last one of a torch.nn.MultiheadAttention, for fuse_attention().
bool ends_multihead_attention(const FusionGraph& graph, const LayerNodes& layer);

/// dropout(layer), both optional. A layer that ends an attention is left to it.
struct BranchNodes {
  LayerNodes layer;
  double dropout_p = 0;
};

/// branch + residual. The branch is the operand of the sum that has the longer chain.
struct SumNodes {
  BranchNodes branch;
  Argument residual;
  bool branch_first;  ///< the strides of the sum are those of its first operand

  /// What follows the layer's arguments: residual, dropout_p, branch_first.
  std::vector<NamedArgument> arguments() const;
};
/// Empty if node i is no sum of two tensors in memory of its own.
std::optional<SumNodes> sum_of_branch(const FusionGraph& graph, std::size_t i);

}  // namespace ddp::detail
