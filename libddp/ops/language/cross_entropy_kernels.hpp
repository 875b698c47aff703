// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

struct CrossEntropyRows {
  const void* logits;  ///< [rows, classes], contiguous
  Element element;     ///< of the logits: float32, bf16 or fp16
  const int64_t* labels;
  int rows, classes;
  int64_t ignore_index;
  float label_smoothing;
};

/// Results of the forward.
struct CrossEntropySums {
  float* maxima;         ///< [rows] largest logit
  float* log_sums;       ///< [rows] logsumexp of the logits less the largest
  float* row_losses;     ///< [rows], scratch
  int* row_marks;        ///< [rows], scratch: 1 counted, 2 right
  float* loss;           ///< [1] mean
  float* inverse_count;  ///< [1] 1 / counted rows
  int64_t* num_correct;  ///< [1]
};

cudaError_t launch_cross_entropy(const CrossEntropyRows& in, const CrossEntropySums& out,
                                 cudaStream_t stream);
/// grad [rows, classes] of the logits' type; grad_loss is one float on the device.
cudaError_t launch_cross_entropy_backward(const CrossEntropyRows& in, const float* maxima,
                                          const float* log_sums, const float* inverse_count,
                                          const float* grad_loss, void* grad, cudaStream_t stream);

}  // namespace ddp::ops::detail
