// SPDX-License-Identifier: Apache-2.0
// The head of a language model and its loss in one op, so that the logits of a large vocabulary
// never exist in float32, and where chunked never all at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp::ops {

inline constexpr int64_t kIgnoreIndex = -100;

/// pad_rows() fills up to a multiple of this.
inline constexpr int64_t kRowMultiple = 128;

struct LinearCrossEntropyOptions {
  int64_t chunk_tokens = 0;  ///< rows whose logits exist at a time; 0: all
  int64_t ignore_index = kIgnoreIndex;
};

struct LinearCrossEntropyResult {
  at::Tensor loss_sum;  ///< float32, 0-dim: sum over the rows that are not ignored
  at::Tensor
      num_correct;  ///< int64, 0-dim, without gradient: rows whose largest logit is the label
};

/// sum over rows t of logsumexp(logits[t]) - logits[t, labels[t]], with logits = hidden weightᵀ in
/// hidden's dtype and all sums in float32.
///
///   hidden [tokens, dim], weight [vocab, dim], labels int64 [tokens] (ignore_index: not counted)
///
/// The gradients are made in the forward while the logits are there, and scaled in the backward; no
/// gradient of `hidden` or `weight` is made where it is not wanted. Backward runs once. Where
/// `weight` lies in memory padded by pad_rows(), the products run over the padded rows (an odd row
/// length costs them a factor of four to six), of which no one hears.
LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options = {});

/// Gives `weight` [rows, columns] memory for a multiple of kRowMultiple rows, the further ones
/// zero, and keeps values, shape, name and gradient. A `.to()` gives that memory up; call it again
/// then. Free of cost where the memory is there.
void pad_rows(at::Tensor& weight);

/// `weight` with the rows pad_rows() added, sharing its memory, without gradient; `weight` itself
/// where it is not padded.
at::Tensor padded_rows(const at::Tensor& weight);

}  // namespace ddp::ops
