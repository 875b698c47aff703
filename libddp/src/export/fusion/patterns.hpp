// SPDX-License-Identifier: Apache-2.0
// The chains of operators that ddp::ops has an op for.
#pragma once

#include <cstddef>

#include "export/fusion/fusion_graph.hpp"

namespace ddp::detail {

// Each replaces a chain whose last node is node i, and returns whether it did.

/// Of image networks: convolution, batch norm with residual, relu, silu and max pool, and the head.
bool fuse_vision(FusionGraph& graph, std::size_t i);
/// Layer norm, optionally of a residual branch's sum, and RMSNorm as transformers composes it.
bool fuse_norm(FusionGraph& graph, std::size_t i);
/// Linear layer, gelu, dropout, the end of a residual branch.
bool fuse_language(FusionGraph& graph, std::size_t i);
/// Attention, and torch.nn.MultiheadAttention with its projections.
bool fuse_attention(FusionGraph& graph, std::size_t i);
/// Cross-entropy behind a linear layer that nothing else reads.
bool fuse_loss(FusionGraph& graph, std::size_t i);
/// SwiGLU and rotary positions, as transformers composes them.
bool fuse_decoder(FusionGraph& graph, std::size_t i);
/// Copies of permuted values, rolls, and products of permuted matrices.
bool fuse_layout(FusionGraph& graph, std::size_t i);

}  // namespace ddp::detail
