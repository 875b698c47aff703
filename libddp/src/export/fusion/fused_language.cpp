// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/core/Reduction.h>

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
    layer.sizes = integers_at(stack[4]);
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

at::Tensor sum_of(const Branch& branch, const at::Tensor& residual, double dropout_p,
                  bool branch_first) {
  auto value = with_bias(branch);
  value = dropout_p > 0 ? at::dropout(value, dropout_p, true) : value;
  return branch_first ? value + residual : residual + value;
}

// On the CPU the sum has the strides that the program gives it, on which sums of it depend.
bool runs_sum(const Branch& branch, const at::Tensor& residual, double dropout_p) {
  return residual.is_cuda() && is_alike(branch.value, residual) && dropout_p < 1;
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

/// torch.nn.MultiheadAttention of [seq, batch, width], whose last layer makes out.sizes of `flat`.
struct MultiheadAttention {
  Layer layer;
  std::vector<int64_t> rows, heads, flat;
  double dropout_p;
  bool is_causal;
  Layer out;
};

// In the program's order, also of the nodes of autograd.
at::Tensor attend_in_parts(const MultiheadAttention& call) {
  const auto packed = result_of(call.layer)
                          .unflatten(-1, {3, -1})
                          .unsqueeze(0)
                          .transpose(0, -2)
                          .squeeze(-2)
                          .contiguous();
  const auto query = packed.select(0, 0), key = packed.select(0, 1), value = packed.select(0, 2);
  const auto query_rows = query.view(call.rows).transpose(0, 1);
  const auto key_rows = key.view(call.rows).transpose(0, 1);
  const auto value_rows = value.view(call.rows).transpose(0, 1);
  const auto query_heads = query_rows.view(call.heads), key_heads = key_rows.view(call.heads);
  auto out = call.out;
  out.input = at::scaled_dot_product_attention(query_heads, key_heads, value_rows.view(call.heads),
                                               {}, call.dropout_p, call.is_causal)
                  .permute({2, 0, 1, 3})
                  .contiguous()
                  .view(call.flat);
  return result_of(out);
}

// Whether a view of these sizes, of which one may be -1, has the others.
bool is_view_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& others) {
  return at::infer_size(sizes, c10::multiply_integers(others)) == others;
}

bool runs_op(const MultiheadAttention& call) {
  const auto &x = call.layer.input, &out_weight = call.out.weight;
  if (!runs_op(call.layer) || x.dim() != 3 || x.numel() == 0 || call.heads.size() != 4 ||
      call.dropout_p >= 1) {
    return false;
  }
  const auto seq = x.size(0), batch = x.size(1), heads = call.heads[1], dim = call.heads[3];
  const auto width = heads * dim, outputs = call.out.outputs();
  return heads > 0 && dim > 0 && call.layer.outputs() == 3 * width &&
         is_view_of(call.heads, {batch, heads, seq, dim}) &&
         is_view_of(call.rows, {seq, batch * heads, dim}) &&
         is_view_of(call.flat, {seq * batch, width}) && out_weight.dim() == 2 &&
         out_weight.size(1) == width && has_dtype_of(x, out_weight) &&
         fits_bias(outputs, call.out.bias) && is_view_of(*call.out.sizes, {seq, batch, outputs});
}

// Computes in [batch, seq, width], where split_heads() needs no copy.
at::Tensor attend(const MultiheadAttention& call) {
  const auto x = call.layer.input.transpose(0, 1).contiguous();
  const auto& bias = call.layer.bias;
  const auto num_heads = call.heads[1];
  const auto [query, key, value] = ops::split_heads(
      ops::linear(x, call.layer.weight, {.bias = bias.defined() ? bias.detach() : bias}), num_heads,
      num_heads, {.added_bias = bias});
  const auto attended =
      ops::attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                     {.is_causal = call.is_causal, .dropout_p = call.dropout_p});
  return ops::linear(attended.transpose(1, 2).reshape({x.size(0), x.size(1), -1}), call.out.weight,
                     {.bias = call.out.bias})
      .transpose(0, 1);
}

// Whether the layer's result, flattened as the program does it, is [rows, vocab].
bool makes_rows(const Layer& layer, std::optional<int64_t> last_flattened, int64_t rows) {
  if (layer.sizes) {
    return !last_flattened && is_view_of(*layer.sizes, {rows, layer.outputs()});
  }
  const auto dims = layer.input.dim();
  return last_flattened ? dims == 3 || (dims > 1 && *last_flattened == -2) : dims == 2;
}

// Labels that are no indices are left to LibTorch.
bool fits_loss(const Layer& layer, std::optional<int64_t> last_flattened,
               const at::Tensor& labels) {
  if (!runs_op(layer) || labels.dim() != 1 || labels.scalar_type() != at::kLong ||
      labels.device() != layer.input.device()) {
    return false;
  }
  const auto rows = layer.input.numel() / layer.input.size(-1);
  return rows > 0 && labels.size(0) == rows && makes_rows(layer, last_flattened, rows);
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
  const bool branch_first = stack[kLayer + 2].toBool();
  if (dropout_p == 0) {
    if (const auto sum = linear_plus_residual(layer, residual)) {
      stack = {*sum};
      return;
    }
  }
  const auto branch = run_branch(layer);
  stack = {
      runs_sum(branch, residual, dropout_p) && residual.dim() > 0
          ? ops::add_branch(branch.value, residual, {.bias = branch.bias, .dropout_p = dropout_p})
          : sum_of(branch, residual, dropout_p, branch_first)};
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
  const bool branch_first = stack[kLayer + 2].toBool();
  const auto weight = stack[kLayer + 3].toTensor(), bias = stack[kLayer + 4].toTensor();
  const double eps = stack[kLayer + 5].toDouble();
  if (runs_sum(branch, residual, dropout_p) && fits_norm(residual, weight)) {
    const auto result = ops::add_layer_norm(branch.value, residual, weight, bias, eps,
                                            {.bias = branch.bias, .dropout_p = dropout_p});
    stack = {result.normed, result.residual};
  } else {
    const auto sum = sum_of(branch, residual, dropout_p, branch_first);
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

void multihead_attention(Stack& stack) {
  const MultiheadAttention call = {.layer = layer_at(stack),
                                   .rows = integers_at(stack[kLayer]),
                                   .heads = integers_at(stack[kLayer + 1]),
                                   .flat = integers_at(stack[kLayer + 4]),
                                   .dropout_p = stack[kLayer + 2].toDouble(),
                                   .is_causal = stack[kLayer + 3].toBool(),
                                   .out = {.input = {},
                                           .weight = stack[kLayer + 5].toTensor(),
                                           .bias = tensor_or_none(stack[kLayer + 6]),
                                           .sizes = integers_at(stack[kLayer + 7])}};
  stack = {runs_op(call) ? attend(call) : attend_in_parts(call)};
}

void linear_cross_entropy(Stack& stack) {
  const auto layer = layer_at(stack);
  const bool is_float = stack[kLayer].toBool();
  const auto last_flattened = stack[kLayer + 1].toOptional<int64_t>();
  const auto labels = stack[kLayer + 2].toTensor();
  const auto reduction = stack[kLayer + 3].toInt(), ignore_index = stack[kLayer + 4].toInt();
  const double label_smoothing = stack[kLayer + 5].toDouble();
  if (!fits_loss(layer, last_flattened, labels)) {
    auto logits = result_of(layer);
    logits = is_float ? logits.to(at::kFloat) : logits;
    logits = last_flattened ? logits.flatten(0, *last_flattened) : logits;
    stack = {at::cross_entropy_loss(logits, labels, {}, reduction, ignore_index, label_smoothing)};
    return;
  }
  const auto& input = layer.input;
  const auto result = ops::linear_cross_entropy(
      input.reshape({-1, input.size(-1)}), layer.weight, labels,
      {.ignore_index = ignore_index, .bias = layer.bias, .label_smoothing = label_smoothing});
  const auto loss =
      reduction == at::Reduction::Mean ? result.loss_sum / result.num_targets : result.loss_sum;
  stack = {is_float || is_under_autocast(input) ? loss : loss.to(input.scalar_type())};
}

}  // namespace ddp::detail::fused
