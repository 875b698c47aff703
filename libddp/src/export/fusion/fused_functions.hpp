// SPDX-License-Identifier: Apache-2.0
// What runs in place of a chain of operators: ops of ddp::ops, or LibTorch's operators for inputs
// that an op does not take. Each takes its arguments from the stack and leaves its results.
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

namespace ddp::detail::fused {

using Stack = std::vector<c10::IValue>;

// A norm is seven arguments: weight, bias, running_mean, running_var, training, momentum, eps. The
// four functions with a relu leave their result twice, for two readers.
void batch_norm(Stack& stack);                ///< x, norm
void batch_norm_silu(Stack& stack);           ///< x, norm
void batch_norm_relu(Stack& stack);           ///< x, norm
void batch_norm_relu_max_pool(Stack& stack);  ///< x, norm
void batch_norm_add_relu(Stack& stack);       ///< x, norm, residual, in place?, norm first?
void two_batch_norms_add_relu(Stack& stack);  ///< x, norm, z, norm, in place?, x first?
void convolution(Stack& stack);               ///< x, weight, bias or None, stride, padding
void pooled_linear(Stack& stack);             ///< x, weight, bias
/// x, whether by mean.dim. The second result is for scale_channels alone: x, or a list of x and its
/// scale's slot.
void channel_means(Stack& stack);
void scale_channels(Stack& stack);  ///< that second result, scale, whether the scale comes first
void scale_samples(Stack& stack);   ///< x, scale, whether the scale is the first factor

// A layer is five arguments: input, weight, bias or None, whether the weight is [in, out], and the
// sizes of its result or None. Without a weight the input is the layer's result.
void linear(Stack& stack);      ///< layer
void gelu(Stack& stack);        ///< layer, whether by tanh, whether composed of operators
void add_branch(Stack& stack);  ///< layer, residual, dropout_p, whether the residual comes second
void dropout(Stack& stack);     ///< x, dropout_p
/// input, norm's weight, bias, eps. The norms leave a second result, their input.
void layer_norm(Stack& stack);
void add_layer_norm(Stack& stack);  ///< as add_branch; norm's weight, bias, eps
/// input, weight, eps, dtype in which the weight is multiplied, whether the second result is
/// float32
void rms_norm(Stack& stack);
/// query, key, value, dropout_p, is_causal, scale or None, enable_gqa
void attention(Stack& stack);
/// layer of [seq, batch, width] that makes query, key and value; sizes of their rows and of their
/// heads, dropout_p, is_causal, sizes of all rows; weight, bias or None and sizes of the last layer
void multihead_attention(Stack& stack);
/// layer, whether its result is converted to float32, the last of its dimensions that are flattened
/// or None, labels, reduction, ignore_index, label_smoothing
void linear_cross_entropy(Stack& stack);
void swiglu(Stack& stack);  ///< gate, up, whether silu(gate) is the first factor
/// x, cos, sin, dimension of which x is cut, where it is cut
void apply_rotary(Stack& stack);

void reshape(Stack& stack);      ///< x, shape
void contiguous(Stack& stack);   ///< x
void roll(Stack& stack);         ///< x, shifts, dims
void pad_nothing(Stack& stack);  ///< x, pad: zeros
void matmul(Stack& stack);       ///< a, b, factor of a
/// x, the dimensions of its pixels that are halved, whether those of the first follow each other
void space_to_depth(Stack& stack);

// 0.5 x (1 + tanh(kSqrt2OverPi (x + kGeluCubic x³)))
inline constexpr double kSqrt2OverPi = 0.7978845608028654, kGeluCubic = 0.044715;

}  // namespace ddp::detail::fused
