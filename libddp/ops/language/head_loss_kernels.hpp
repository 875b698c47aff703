// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// Logits of a language model's head, [rows, leading], 16-byte aligned. Columns from `vocab` on are
/// padding. leading is a multiple of 8.
struct HeadLogits {
  void* logits;
  Element element;  ///< bf16 or fp16
  const int64_t* labels;
  int64_t rows, vocab, leading;
  int64_t ignore_index;
  float label_smoothing, z_loss;
};

struct HeadLossSums {
  float* row_losses;     ///< [rows], scratch
  int* row_marks;        ///< [rows], scratch: 1: the largest logit is the label
  float* loss;           ///< [1], the sum over rows is added
  int64_t* num_correct;  ///< [1], the count is added
};

/// The loss of each row that is not ignored, as ddp::ops::linear_cross_entropy() defines it, NaN
/// for a label outside the vocabulary. With `make_grad` the logits become the gradient of the sum,
/// 0 in padding and in ignored rows.
cudaError_t launch_head_loss(const HeadLogits& in, bool make_grad, const HeadLossSums& out,
                             cudaStream_t stream);

}  // namespace ddp::ops::detail
