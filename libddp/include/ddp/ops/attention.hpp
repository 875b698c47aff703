// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention with a kernel chosen by name, not by LibTorch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ddp::ops {

enum class AttentionBackend {
  Auto,   ///< cuDNN if possible and shapes_recur, else Flash if possible, else Math; on the CPU
          ///< LibTorch's choice
  Cudnn,  ///< CUDA, bfloat16 or float16
  Flash,  ///< FlashAttention 2; CUDA, bfloat16 or float16
  Math,   ///< plain matrix products and a softmax: the definition; any device and dtype
};
/// Names as settings use them: auto, cudnn, flash, math.
const std::vector<std::pair<std::string, AttentionBackend>>& attention_backend_names();

struct AttentionOptions {
  AttentionBackend backend = AttentionBackend::Auto;
  bool is_causal = true;
  double dropout_p = 0;           ///< of the attention weights; 0 outside training
  std::optional<double> scale{};  ///< of the scores; unset: 1 / sqrt(head_dim)
  /// Added to the scores, broadcast to [batch, heads, q_len, k_len]: 0 if a query reads a key, else
  /// -inf. Always uses the Math backend. Not with is_causal, not for packed documents.
  at::Tensor mask{};
  /// Auto: whether shapes recur, as in training: cuDNN makes a plan for each. A recomputed forward
  /// needs the same value as the first forward, or another kernel may run.
  bool shapes_recur = true;
};

/// softmax(scale * Q Kᵀ + mask) V for each head. If `key` has fewer heads than `query` (a divisor),
/// this is grouped-query attention: query head h reads key head h / (heads / kv_heads), without
/// expansion.
///
///   query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, k_len, head_dim]
///   -> [batch, heads, q_len, head_dim]
///
/// Any strides with a dense last dimension. With `is_causal` position i reads 0 … i, and q_len must
/// be k_len. Throws std::invalid_argument naming the backend if it cannot serve the inputs.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options = {});

/// Same, for concatenated documents, each attending only to itself.
///
///   query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]
///   offsets int32 [documents + 1]: where each begins; first 0, last `tokens`, ascending
///   max_length: of the longest document, known to the host
///   -> [tokens, heads, head_dim]
///
/// Auto runs Flash if possible. Math and the CPU loop over documents (and read `offsets` on the
/// host). Cudnn is refused: it has no kernel for documents here.
at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& offsets, int64_t max_length,
                            const AttentionOptions& options = {});

}  // namespace ddp::ops
