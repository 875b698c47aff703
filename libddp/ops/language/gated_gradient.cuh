// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0F / (1.0F + __expf(-x));
}

/// SwiGLU's gradients of eight gates and ups, for `grad` of its results.
template <typename T>
__device__ __forceinline__ void gated_gradients(const T* grad, const T* gate, const T* up,
                                                float (&of_gate)[8], float (&of_up)[8]) {
  float d[8], g[8], u[8];
  load8(grad, 1, d);
  load8(gate, 1, g);
  load8(up, 1, u);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float s = sigmoid(g[j]);
    of_gate[j] = u[j] * (d[j] * s * (1.0F + g[j] * (1.0F - s)));
    of_up[j] = d[j] * (g[j] * s);
  }
}

}  // namespace ddp::ops::detail
