// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/InferSize.h>

#include <optional>
#include <vector>

#include "ddp/ops/language.hpp"
#include "export/fusion/fused_conditions.hpp"
#include "export/fusion/fused_functions.hpp"

namespace ddp::detail::fused {
namespace {

constexpr std::size_t kLayer = 5;  // arguments

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

struct Layer {
  at::Tensor input, weight, bias;
  bool transposed = false;
  std::optional<std::vector<int64_t>> sizes = {};

  int64_t outputs() const { return weight.size(transposed ? 1 : 0); }
};

Layer layer_at(const Stack& stack) {
  Layer layer = {.input = stack[0].toTensor(),
                 .weight = tensor_or_none(stack[1]),
                 .bias = tensor_or_none(stack[2]),
                 .transposed = stack[3].toBool()};
  if (!stack[4].isNone()) {
    layer.sizes.emplace();
    for (const auto& size : stack[4].toListRef()) {
      layer.sizes->push_back(size.toInt());
    }
  }
  return layer;
}

// The op also takes mixed dtypes, which LibTorch refuses.
bool runs_op(const Layer& layer) {
  const auto &input = layer.input, &weight = layer.weight;
  return input.is_cuda() && input.dim() > 0 && weight.dim() == 2 && input.size(-1) > 0 &&
         has_dtype_of(input, weight) && fits_bias(layer.outputs(), layer.bias);
}

at::Tensor viewed(const Layer& layer, const at::Tensor& product) {
  return layer.sizes ? product.view(*layer.sizes) : product;
}

at::Tensor result_of(const Layer& layer) {
  if (!layer.weight.defined()) {
    return layer.input;
  }
  if (runs_op(layer)) {
    return viewed(layer, ops::linear(layer.input, layer.weight,
                                     {.bias = layer.bias, .transposed = layer.transposed}));
  }
  return viewed(layer, layer.transposed ? at::addmm(layer.bias, layer.input, layer.weight)
                                        : at::linear(layer.input, layer.weight, layer.bias));
}

// On the CPU the program's own operators run in its order, so that the numbers stay.
struct Branch {
  at::Tensor value;
  at::Tensor bias = {};  // to be added to the value by an op that computes the bias's gradient too
};

Branch run_branch(const Layer& layer) {
  if (!layer.weight.defined() || !layer.bias.defined() || !runs_op(layer)) {
    return {result_of(layer)};
  }
  const auto product = ops::linear(layer.input, layer.weight, {.transposed = layer.transposed});
  const auto value = viewed(layer, product);
  const bool is_last = value.dim() > 0 && value.size(-1) == layer.outputs();
  return is_last ? Branch{value, layer.bias}
                 : Branch{viewed(layer, product + layer.bias.to(product.scalar_type()))};
}

at::Tensor with_bias(const Branch& branch) {
  return branch.bias.defined() ? branch.value + branch.bias.to(branch.value.scalar_type())
                               : branch.value;
}

at::Tensor sum_of(const Branch& branch, const at::Tensor& residual, double dropout_p) {
  const auto value = with_bias(branch);
  return residual + (dropout_p > 0 ? at::dropout(value, dropout_p, true) : value);
}

// The residual in the shape of the layer's product, if its result has the residual's.
std::optional<at::Tensor> residual_in_product_sizes(const Layer& layer,
                                                    const at::Tensor& residual) {
  auto sizes = layer.input.sizes().vec();
  sizes.back() = layer.outputs();
  if (!layer.sizes) {
    return residual.sizes() == at::IntArrayRef(sizes) ? std::optional(residual) : std::nullopt;
  }
  const auto elements = c10::multiply_integers(sizes);
  return elements > 0 && residual.sizes() == at::infer_size(*layer.sizes, elements)
             ? std::optional(residual.reshape(sizes))
             : std::nullopt;
}

// The sum as part of the product. Autocast and mixed dtypes are left to LibTorch.
std::optional<at::Tensor> linear_plus_residual(const Layer& layer, const at::Tensor& residual) {
  if (!layer.weight.defined() || !runs_op(layer) || is_under_autocast(layer.input) ||
      residual.scalar_type() != layer.input.scalar_type() ||
      residual.device() != layer.input.device()) {
    return std::nullopt;
  }
  const auto addend = residual_in_product_sizes(layer, residual);
  if (!addend) {
    return std::nullopt;
  }
  const auto sum =
      ops::linear(layer.input, layer.weight,
                  {.bias = layer.bias, .residual = *addend, .transposed = layer.transposed});
  return viewed(layer, sum);
}

// The operator of LibTorch is in autocast's list, and the op is not.
at::Tensor cast(const at::Tensor& x) {
  const auto type = x.device().type();
  return is_under_autocast(x) && x.is_floating_point() && !is_double(x)
             ? x.to(at::autocast::get_autocast_dtype(type))
             : x;
}

// Shapes that LibTorch would broadcast are left to it.
bool fits_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    bool is_causal, bool enable_gqa) {
  if (query.dim() != 4 || key.dim() != 4 || key.sizes() != value.sizes() ||
      query.scalar_type() != key.scalar_type() || key.scalar_type() != value.scalar_type() ||
      query.device() != key.device() || key.device() != value.device() ||
      query.size(0) != key.size(0) || query.size(3) != key.size(3)) {
    return false;
  }
  const bool has_groups = enable_gqa && key.size(1) > 0 && query.size(1) % key.size(1) == 0;
  return (query.size(1) == key.size(1) || has_groups) &&
         (!is_causal || query.size(2) == key.size(2));
}

// Autocast computes norms in float32, and the ops in their input's dtype.
bool fits_norm(const at::Tensor& x, const at::Tensor& weight) {
  return !is_under_autocast(x) && x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(-1);
}

// As transformers' NewGELUActivation, in its order: the backward sums the gradients of x in it.
at::Tensor composed_gelu(const at::Tensor& x) {
  const auto half = x * 0.5;
  const auto cubic = x.pow(3.0) * kGeluCubic;
  return half * (at::tanh((x + cubic) * kSqrt2OverPi) + 1.0);
}

}  // namespace

void linear(Stack& stack) {
  stack = {result_of(layer_at(stack))};
}

void gelu(Stack& stack) {
  const bool tanh = stack[kLayer].toBool(), is_composed = stack[kLayer + 1].toBool();
  const auto branch = run_branch(layer_at(stack));
  const auto& x = branch.value;
  if (is_composed && (!x.is_cuda() || is_under_autocast(x))) {
    stack = {composed_gelu(with_bias(branch))};  // autocast computes its power in float32
  } else if (x.is_cuda() && x.dim() > 0) {
    stack = {ops::gelu(x, {.bias = branch.bias, .tanh = tanh})};
  } else {
    stack = {at::gelu(with_bias(branch), tanh ? "tanh" : "none")};
  }
}

void add_branch(Stack& stack) {
  const auto layer = layer_at(stack);
  const auto residual = tensor_of(stack[kLayer]);
  const double dropout_p = stack[kLayer + 1].toDouble();
  if (dropout_p == 0) {
    if (const auto sum = linear_plus_residual(layer, residual)) {
      stack = {*sum};
      return;
    }
  }
  const auto branch = run_branch(layer);
  stack = {
      is_alike(branch.value, residual) && residual.dim() > 0 && dropout_p < 1
          ? ops::add_branch(branch.value, residual, {.bias = branch.bias, .dropout_p = dropout_p})
          : sum_of(branch, residual, dropout_p)};
}

void dropout(Stack& stack) {
  const auto x = stack[0].toTensor();
  const double p = stack[1].toDouble();
  stack = {x.is_cuda() && x.dim() > 0 && p < 1 ? ops::dropout(x, p) : at::dropout(x, p, true)};
}

void layer_norm(Stack& stack) {
  const auto input = stack[0].toTensor(), weight = stack[1].toTensor(), bias = stack[2].toTensor();
  const double eps = stack[3].toDouble();
  if (fits_norm(input, weight)) {
    const auto result = ops::layer_norm(input, weight, bias, eps);
    stack = {result.normed, result.residual};
  } else {
    stack = {at::layer_norm(input, weight.sizes(), weight, bias, eps), input};
  }
}

void add_layer_norm(Stack& stack) {
  const auto branch = run_branch(layer_at(stack));
  const auto residual = tensor_of(stack[kLayer]);
  const double dropout_p = stack[kLayer + 1].toDouble();
  const auto weight = stack[kLayer + 2].toTensor(), bias = stack[kLayer + 3].toTensor();
  const double eps = stack[kLayer + 4].toDouble();
  if (fits_norm(residual, weight) && is_alike(branch.value, residual) && dropout_p < 1) {
    const auto result = ops::add_layer_norm(branch.value, residual, weight, bias, eps,
                                            {.bias = branch.bias, .dropout_p = dropout_p});
    stack = {result.normed, result.residual};
  } else {
    const auto sum = sum_of(branch, residual, dropout_p);
    stack = {at::layer_norm(sum, weight.sizes(), weight, bias, eps), sum};
  }
}

void rms_norm(Stack& stack) {
  const auto input = stack[0].toTensor(), weight = tensor_of(stack[1]);
  const double eps = stack[2].toDouble();
  const auto dtype = stack[3].toScalarType();
  const bool passes_wide = stack[4].toBool();
  const bool is_plain = input.is_cuda() && input.scalar_type() == dtype && !is_double(input) &&
                        weight.scalar_type() == dtype && (!passes_wide || dtype == at::kFloat);
  if (is_plain && fits_norm(input, weight)) {
    const auto result = ops::rms_norm(input, weight, eps);
    stack = {result.normed, result.residual};
    return;
  }
  const auto wide = input.to(at::kFloat);
  const auto normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + eps);
  stack = {weight * normed.to(dtype), passes_wide ? wide : input};
}

void attention(Stack& stack) {
  const auto query = cast(stack[0].toTensor()), key = cast(stack[1].toTensor());
  const auto value = cast(stack[2].toTensor());
  const double dropout_p = stack[3].toDouble();
  const bool is_causal = stack[4].toBool(), enable_gqa = stack[6].toBool();
  const auto scale = stack[5].toOptional<double>();
  stack = {fits_attention(query, key, value, is_causal, enable_gqa)
               ? ops::attention(query, key, value,
                                {.is_causal = is_causal, .dropout_p = dropout_p, .scale = scale})
               : at::scaled_dot_product_attention(query, key, value, {}, dropout_p, is_causal,
                                                  scale, enable_gqa)};
}

}  // namespace ddp::detail::fused
