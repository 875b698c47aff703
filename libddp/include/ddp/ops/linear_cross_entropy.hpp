// SPDX-License-Identifier: Apache-2.0
// The head of a language model and its loss in one op. The logits of a large vocabulary never exist
// in float32, and with chunks never all at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp::ops {

inline constexpr int64_t kIgnoreIndex = -100;

/// pad_rows() rounds the number of rows up to a multiple of this.
inline constexpr int64_t kRowMultiple = 128;

struct LinearCrossEntropyOptions {
  int64_t chunk_tokens = 0;  ///< rows of logits in memory at a time; 0: all
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
///   hidden [tokens, dim], weight [vocab, dim], labels int64 [tokens] (ignore_index: ignored)
///
/// The forward computes the required gradients of `hidden` and `weight` while the logits exist; the
/// backward scales them. Backward runs once. If pad_rows() padded `weight`, the products include
/// the padded rows, which do not affect results. (Products with odd row lengths are four to six
/// times slower.)
LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options = {});

/// Reallocates `weight` [rows, columns] with a multiple of kRowMultiple rows, the additional rows
/// zero. Keeps values, shape, name and gradient. A `.to()` drops the padding; call pad_rows()
/// again. Does nothing if `weight` is already padded.
void pad_rows(at::Tensor& weight);

/// `weight` with the rows added by pad_rows(), sharing its memory, without gradient; `weight`
/// itself if it is not padded.
at::Tensor padded_rows(const at::Tensor& weight);

}  // namespace ddp::ops
