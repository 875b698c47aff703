// SPDX-License-Identifier: Apache-2.0
// Nothing runs a program here, so the fuzzers do without ddp::ops.
#include "export/fusion/fused_functions.hpp"
#include "ops/layout/layout.hpp"

namespace ddp::detail::fused {

void batch_norm(Stack&) {}
void batch_norm_silu(Stack&) {}
void batch_norm_relu(Stack&) {}
void batch_norm_relu_max_pool(Stack&) {}
void batch_norm_add_relu(Stack&) {}
void two_batch_norms_add_relu(Stack&) {}
void convolution(Stack&) {}
void pooled_linear(Stack&) {}
void channel_means(Stack&) {}
void scale_channels(Stack&) {}
void scale_samples(Stack&) {}
void reshape(Stack&) {}
void contiguous(Stack&) {}
void roll(Stack&) {}
void pad_nothing(Stack&) {}
void matmul(Stack&) {}
void space_to_depth(Stack&) {}
void linear(Stack&) {}
void gelu(Stack&) {}
void add_branch(Stack&) {}
void dropout(Stack&) {}
void layer_norm(Stack&) {}
void add_layer_norm(Stack&) {}
void rms_norm(Stack&) {}
void attention(Stack&) {}
void multihead_attention(Stack&) {}
void linear_cross_entropy(Stack&) {}
void swiglu(Stack&) {}
void apply_rotary(Stack&) {}

}  // namespace ddp::detail::fused

namespace ddp::ops::detail {

std::vector<at::Tensor> select_rows(const at::Tensor&, int64_t, int64_t) {
  return {};
}

}  // namespace ddp::ops::detail
