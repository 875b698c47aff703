// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/fused_functions.hpp"

#include <ATen/ATen.h>

#include "ddp/ops/language.hpp"
#include "ddp/ops/vision.hpp"
#include "export/fusion/fused_conditions.hpp"
#include "ops/vision/channel_scale.hpp"

namespace ddp::detail::fused {
namespace {

constexpr std::size_t kNorm = 7;  // arguments

ops::BatchNormLayer norm_at(const Stack& stack, std::size_t first) {
  ops::BatchNormLayer norm;
  norm.weight = stack[first].toTensor();
  norm.bias = stack[first + 1].toTensor();
  norm.running_mean = stack[first + 2].toTensor();
  norm.running_var = stack[first + 3].toTensor();
  norm.training = stack[first + 4].toBool();
  norm.momentum = stack[first + 5].toDouble();
  norm.eps = stack[first + 6].toDouble();
  return norm;
}

at::Tensor normalised(const at::Tensor& x, const ops::BatchNormLayer& norm) {
  return at::batch_norm(x, norm.weight, norm.bias, norm.running_mean, norm.running_var,
                        norm.training, norm.momentum, norm.eps,
                        at::globalContext().userEnabledCuDNN());
}

void push(Stack& stack, const at::Tensor& result) {
  stack = {result, result};
}
void push(Stack& stack, const ops::Fork& fork) {
  stack = {fork.branch, fork.shortcut};
}

// The ops take images [batch, channels, height, width], in training with several values per
// channel.
bool fits_batch_norm(const at::Tensor& x, const ops::BatchNormLayer& norm) {
  return x.dim() == 4 && !(norm.training && x.numel() <= x.size(1));
}

// x + addend, or addend added to x's own memory, whose shape and dtype then stay.
at::Tensor sum(const at::Tensor& x, const at::Tensor& addend, bool in_place) {
  return in_place ? at::Tensor(x).add_(addend) : x + addend;
}

// Whether windows side by side cover images of few channels. cuDNN has no fast kernel for these.
bool are_patches(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto patch = weight.size(2);
  const bool is_half = is_under_autocast(x) || x.scalar_type() == at::kBFloat16 ||
                       x.scalar_type() == at::kHalf;  // in float32 both have settings of their own
  return x.is_cuda() && is_half && x.size(1) <= 4 && !x.requires_grad() && patch > 1 &&
         x.numel() > 0 && x.size(2) % patch == 0 && x.size(3) % patch == 0 &&
         fits_bias(weight.size(0), bias);
}

// As a product of a matrix: a patch's values lie in the order of the weight's.
at::Tensor patch_embedding(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto patch = weight.size(2), rows = x.size(2) / patch, columns = x.size(3) / patch;
  const bool is_channels_last = weight.is_contiguous(at::MemoryFormat::ChannelsLast);
  const auto pixels = x.unflatten(2, {rows, patch}).unflatten(4, {columns, patch});
  const auto patches =
      is_channels_last ? pixels.permute({0, 2, 4, 3, 5, 1}) : pixels.permute({0, 2, 4, 1, 3, 5});
  const auto matrix = (is_channels_last ? weight.permute({0, 2, 3, 1}) : weight).flatten(1);
  return ops::linear(patches.flatten(3), matrix, {.bias = bias}).permute({0, 3, 1, 2});
}

}  // namespace

void batch_norm(Stack& stack) {
  const auto x = stack[0].toTensor();
  const auto norm = norm_at(stack, 1);
  stack = {fits_batch_norm(x, norm) ? ops::batch_norm(x, norm) : normalised(x, norm)};
}

void batch_norm_silu(Stack& stack) {
  const auto x = stack[0].toTensor();
  const auto norm = norm_at(stack, 1);
  stack = {fits_batch_norm(x, norm) ? ops::batch_norm_silu(x, norm)
                                    : at::silu(normalised(x, norm))};
}

void batch_norm_relu(Stack& stack) {
  const auto x = stack[0].toTensor();
  const auto norm = norm_at(stack, 1);
  fits_batch_norm(x, norm) ? push(stack, ops::batch_norm_relu_fork(x, norm))
                           : push(stack, normalised(x, norm).relu());
}

void batch_norm_relu_max_pool(Stack& stack) {
  const auto x = stack[0].toTensor();
  const auto norm = norm_at(stack, 1);
  fits_batch_norm(x, norm) ? push(stack, ops::batch_norm_relu_max_pool(x, norm))
                           : push(stack, at::max_pool2d(normalised(x, norm).relu(), 3, 2, 1));
}

void batch_norm_add_relu(Stack& stack) {
  const auto x = stack[0].toTensor(), residual = tensor_of(stack[1 + kNorm]);
  const auto norm = norm_at(stack, 1);
  const bool in_place = stack[2 + kNorm].toBool(), norm_first = stack[3 + kNorm].toBool();
  if (x.is_cuda() && fits_batch_norm(x, norm) && is_alike(x, residual)) {
    push(stack, ops::batch_norm_add_relu(x, norm, residual));
  } else {
    const auto normed = normalised(x, norm);
    push(stack, (norm_first ? sum(normed, residual, in_place) : residual + normed).relu());
  }
}

void two_batch_norms_add_relu(Stack& stack) {
  const auto x = stack[0].toTensor(), z = stack[1 + kNorm].toTensor();
  const auto norm = norm_at(stack, 1), norm_z = norm_at(stack, 2 + kNorm);
  const bool in_place = stack[2 + 2 * kNorm].toBool(), x_first = stack[3 + 2 * kNorm].toBool();
  if (x.is_cuda() && fits_batch_norm(x, norm) && fits_batch_norm(z, norm_z) && is_alike(x, z)) {
    push(stack, ops::batch_norm_add_relu(x, norm, z, norm_z));
  } else if (x_first) {  // in this order the backward sums the gradients of a shared input
    const auto normed = normalised(x, norm);
    push(stack, sum(normed, normalised(z, norm_z), in_place).relu());
  } else {
    const auto normed_z = normalised(z, norm_z);
    push(stack, sum(normalised(x, norm), normed_z, in_place).relu());
  }
}

void convolution(Stack& stack) {
  const auto x = stack[0].toTensor(), weight = stack[1].toTensor();
  const auto bias = stack[2].isTensor() ? stack[2].toTensor() : at::Tensor();
  const auto stride = stack[3].toInt(), padding = stack[4].toInt();
  const auto kernel = weight.dim() == 4 && weight.size(2) == weight.size(3) ? weight.size(2) : 0;
  const bool is_dense =
      x.dim() == 4 && has_dtype_of(x, weight) && kernel > 0 && x.size(1) == weight.size(1);
  if (is_dense && kernel == stride && padding == 0 && are_patches(x, weight, bias)) {
    stack = {patch_embedding(x, weight, bias)};
  } else if (is_dense && !bias.defined() && x.size(1) == 3 && !x.requires_grad() &&
             ((kernel == 7 && stride == 2 && padding == 3) ||
              (kernel == 3 && stride == 1 && padding == 1))) {
    stack = {ops::stem_convolution(x, weight)};
  } else if (is_dense && !bias.defined() && (kernel == 1 || kernel == 3) && padding == kernel / 2) {
    stack = {ops::conv2d(x, weight, stride, padding)};
  } else {
    stack = {at::conv2d(x, weight, bias, stride, padding)};
  }
}

void pooled_linear(Stack& stack) {
  const auto x = stack[0].toTensor(), weight = stack[1].toTensor(), bias = stack[2].toTensor();
  stack = {x.dim() == 4 && weight.dim() == 2 && has_dtype_of(x, weight) &&
                   fits_bias(weight.size(0), bias)
               ? ops::pooled_linear(x, weight, bias)
               : at::linear(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1), weight, bias)};
}

void channel_means(Stack& stack) {
  const auto x = stack[0].toTensor();
  const bool by_mean = stack[1].toBool();
  if (ops::detail::fits_channel_kernels(x)) {
    const auto made = ops::detail::channel_means(x);
    stack = {made.means, c10::IValue(std::vector<at::Tensor>{made.x, made.scale_slot})};
  } else {
    stack = {by_mean ? at::mean(x, {2, 3}, /*keepdim=*/true) : at::adaptive_avg_pool2d(x, {1, 1}),
             x};
  }
}

void scale_channels(Stack& stack) {
  const auto scale = stack[1].toTensor();
  const bool scale_first = stack[2].toBool();
  if (stack[0].isTensorList()) {
    const auto parts = stack[0].toTensorVector();
    stack = {
        ops::detail::scale_channels({.means = {}, .x = parts[0], .scale_slot = parts[1]}, scale)};
  } else {
    const auto x = stack[0].toTensor();
    stack = {scale_first ? scale * x : x * scale};
  }
}

void scale_samples(Stack& stack) {
  const auto x = tensor_of(stack[0]), scale = tensor_of(stack[1]);
  const bool scale_first = stack[2].toBool();
  stack = {x.is_cuda()   ? ops::detail::scale_samples(x, scale)
           : scale_first ? scale * x
                         : x * scale};
}

}  // namespace ddp::detail::fused
