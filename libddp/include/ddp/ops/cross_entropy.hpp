// SPDX-License-Identifier: Apache-2.0
// The mean cross-entropy with label smoothing, its gradient, and the number of correct predictions,
// each in one read of the logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp::ops {

struct CrossEntropyOptions {
  double label_smoothing = 0;   ///< in [0, 1]: share of the target spread over all classes
  int64_t ignore_index = -100;  ///< label of rows to ignore
};

struct CrossEntropyResult {
  at::Tensor loss;  ///< 0-dim, float32 (float64 for float64 logits): mean over counted rows
  at::Tensor
      num_correct;  ///< 0-dim, int64, without gradient: rows whose largest logit is the label
};

/// With p = softmax(logits), q = (1 - s) onehot(label) + s / classes and s = label_smoothing:
///
///   loss = mean over counted rows of -sum_c q_c log p_c,   dloss/dlogits = (p - q) / counted rows
///
///   logits [rows, classes], float32, float64, bf16 or fp16; labels int64 [rows]
///
/// Defined by at::cross_entropy_loss on float32 logits, which also is the CPU path. On CUDA: one or
/// two kernels forward, one backward, no host sync. Sums have a fixed order, so equal input gives
/// equal bits. On CUDA an invalid label (outside [0, classes), not ignore_index) makes the loss and
/// its row's gradient NaN; the CPU raises. Without counted rows the loss is NaN, as in PyTorch. A
/// row with NaN or an infinite largest logit never counts as correct.
CrossEntropyResult cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                 const CrossEntropyOptions& options = {});

}  // namespace ddp::ops
