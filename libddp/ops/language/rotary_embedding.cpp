// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <vector>

#include "ddp/ops/decoder.hpp"
#include "ddp/ops/language.hpp"
#include "ops/grad_target.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/column_sums.hpp"
#include "ops/language/elementwise_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

constexpr double kPi = 3.14159265358979323846;

// All in float32, product by product as in transformers. Computed in double and rounded once,
// angles at position 4,096 would differ by 2e-4.

/// Llama 3.1: wavelengths above original / low_freq_factor are stretched by `factor`, those below
/// original / high_freq_factor are kept, and those between are blended.
at::Tensor llama3_frequencies(const at::Tensor& frequencies, const RotaryOptions& o) {
  const auto original = static_cast<double>(o.original_max_positions);
  const auto wavelengths = at::reciprocal(frequencies) * (2 * kPi);
  const auto stretched =
      at::where(wavelengths > original / o.low_freq_factor, frequencies / o.factor, frequencies);
  const auto smooth = (at::reciprocal(wavelengths) * original - o.low_freq_factor) /
                      (o.high_freq_factor - o.low_freq_factor);
  const auto blended = (1 - smooth) * stretched / o.factor + smooth * stretched;
  const auto between = (wavelengths >= original / o.high_freq_factor)
                           .logical_and(wavelengths <= original / o.low_freq_factor);
  return at::where(between, blended, stretched);
}

at::Tensor inverse_frequencies(const RotaryOptions& o) {
  const auto exponents = at::arange(0, o.head_dim, 2, at::kFloat) / static_cast<double>(o.head_dim);
  const auto frequencies = at::reciprocal(at::pow(o.theta, exponents));
  if (o.scaling == "linear") {
    return frequencies / o.factor;
  }
  if (o.scaling == "llama3") {
    return llama3_frequencies(frequencies, o);
  }
  if (o.scaling != "none") {
    throw std::invalid_argument("rotary embedding: scaling \"" + o.scaling +
                                "\" is not one of none, linear, llama3");
  }
  return frequencies;
}

/// [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin], `backward` by the opposite angles.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  bool backward) {
  if (!cos.defined()) {
    return x;
  }
  const double direction = backward ? -1 : 1;
  const int64_t half = x.size(-1) / 2;
  const auto x1 = x.narrow(-1, 0, half), x2 = x.narrow(-1, half, half);
  auto output = at::empty(x.sizes(), x.options());
  output.narrow(-1, 0, half).copy_((x1 * cos).addcmul_(x2, sin, -direction));
  output.narrow(-1, half, half).copy_((x2 * cos).addcmul_(x1, sin, direction));
  return output;
}

#ifdef DDP_HAS_CUDA
bool fits_kernel(const at::Tensor& qkv, int64_t head_dim, const at::Tensor& cos) {
  return detail::runs_own_kernels(qkv, qkv.scalar_type()) && qkv.numel() > 0 &&
         qkv.is_contiguous() && head_dim % 16 == 0 && detail::is_aligned(qkv) &&
         (!cos.defined() || (cos.scalar_type() == at::kFloat &&
                             cos.numel() == qkv.size(0) * qkv.size(1) * (head_dim / 2)));
}

/// `heads` [batch, seq, heads, head_dim] at any distance, but in whole vectors.
detail::HeadSource source_of(const at::Tensor& heads) {
  return {.data = heads.const_data_ptr(),
          .heads = heads.size(2),
          .batch_stride = heads.stride(0),
          .seq_stride = heads.stride(1),
          .head_stride = heads.stride(2)};
}

at::Tensor aligned_heads(const at::Tensor& heads) {
  const bool fits = heads.stride(3) == 1 && heads.stride(0) % 8 == 0 && heads.stride(1) % 8 == 0 &&
                    heads.stride(2) % 8 == 0 && detail::is_aligned(heads);
  return fits ? heads : detail::dense(heads);
}

detail::HeadRows rows_of_heads(const std::vector<at::Tensor>& parts, const at::Tensor& out) {
  detail::HeadRows rows{.batch = out.size(0),
                        .seq = out.size(1),
                        .width = out.size(2),
                        .head_dim = parts[0].size(3),
                        .element = detail::element_of(out.scalar_type())};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    rows.sources[i] = source_of(parts[i]);
  }
  return rows;
}

/// Writes the heads of `rows`, rotated but for the last part's, side by side into `out` [batch,
/// seq, width], and their sums over tokens into `sums`.
void rotate_by_kernel(const detail::HeadRows& rows, const at::Tensor& cos, const at::Tensor& sin,
                      bool backward, const at::Tensor& out, const detail::GradTarget& sums = {}) {
  const c10::cuda::CUDAGuard device(out.device());
  const auto angles = [&](const at::Tensor& table) {
    return cos.defined() ? table.const_data_ptr<float>() : nullptr;
  };
  const bool wants_sums = sums.memory.defined();
  const auto parts = wants_sums ? at::empty({detail::num_head_parts(rows), rows.width},
                                            out.options().dtype(at::kFloat))
                                : at::Tensor();
  const auto stream = detail::stream_of(out);
  C10_CUDA_CHECK(
      detail::launch_rotary(rows, angles(cos), angles(sin), backward, out.mutable_data_ptr(),
                            wants_sums ? parts.mutable_data_ptr<float>() : nullptr, stream));
  if (wants_sums) {
    C10_CUDA_CHECK(detail::launch_add_parts(parts.const_data_ptr<float>(), parts.size(0),
                                            rows.width, detail::grad_out(sums), stream));
  }
}
#endif

class SplitHeads : public torch::autograd::Function<SplitHeads> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& qkv,
                                                const std::optional<at::Tensor>& maybe_cos,
                                                const std::optional<at::Tensor>& maybe_sin,
                                                const std::optional<at::Tensor>& added_bias,
                                                int64_t heads, int64_t kv_heads) {
    const auto cos = maybe_cos.value_or(at::Tensor()), sin = maybe_sin.value_or(at::Tensor());
    ctx->save_for_backward({cos, sin, added_bias.value_or(at::Tensor())});
    ctx->saved_data["sizes"] = qkv.sizes().vec();
    ctx->saved_data["counts"] = std::vector<int64_t>{heads, kv_heads, kv_heads};
    ctx->set_materialize_grads(false);
    const int64_t head_dim = qkv.size(2) / (heads + 2 * kv_heads);
    const auto all = qkv.view({qkv.size(0), qkv.size(1), heads + 2 * kv_heads, head_dim});
    const auto query = all.narrow(2, 0, heads), key = all.narrow(2, heads, kv_heads);
    const auto value = detail::alias_of(all.narrow(2, heads + kv_heads, kv_heads));
#ifdef DDP_HAS_CUDA
    if (fits_kernel(qkv, head_dim, cos)) {
      if (cos.defined()) {
        rotate_by_kernel(rows_of_heads({query, key}, qkv), cos, sin, /*backward=*/false, qkv);
        qkv.unsafeGetTensorImpl()->bump_version();
      }
      return {detail::alias_of(query), detail::alias_of(key), value};
    }
#endif
    return {cos.defined() ? rotate(query, cos, sin, /*backward=*/false) : detail::alias_of(query),
            cos.defined() ? rotate(key, cos, sin, /*backward=*/false) : detail::alias_of(key),
            value};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &cos = saved[0], &sin = saved[1], &bias = saved[2];
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    if (!fill_undefined(grads, sizes, ctx->saved_data["counts"].toIntVector())) {
      return torch::autograd::variable_list(6);
    }
    const AutocastOff no_autocast(grads[0].device().type());
    const auto [wants_qkv, wants_cos, wants_sin, wants_bias] =
        detail::wanted_gradients(ctx, {true, cos.defined(), sin.defined(), bias.defined()});
#ifdef DDP_HAS_CUDA
    if (!at::GradMode::is_enabled()) {  // enabled: create_graph=true
      const auto qkv = at::empty(sizes, grads[0].options());
      if (fits_kernel(qkv, grads[0].size(3), cos)) {
        const std::vector<at::Tensor> parts = {aligned_heads(grads[0]), aligned_heads(grads[1]),
                                               aligned_heads(grads[2])};
        const auto target = detail::grad_target(bias, wants_bias);
        rotate_by_kernel(rows_of_heads(parts, qkv), cos, sin, /*backward=*/true, qkv, target);
        return {qkv, {}, {}, target.result(), {}, {}};
      }
    }
#endif
    const auto qkv = at::cat({rotate(grads[0], cos, sin, /*backward=*/true),
                              rotate(grads[1], cos, sin, /*backward=*/true), grads[2]},
                             2)
                         .view(sizes);
    const auto bias_grad =
        wants_bias ? qkv.flatten(0, 1).sum(0).to(bias.scalar_type()) : at::Tensor();
    return {qkv, {}, {}, bias_grad, {}, {}};
  }

 private:
  /// Gives unused heads a gradient of zeros if others have one; returns whether they do.
  static bool fill_undefined(torch::autograd::variable_list& grads,
                             const std::vector<int64_t>& sizes,
                             const std::vector<int64_t>& counts) {
    const auto used = std::find_if(grads.begin(), grads.end(),
                                   [](const at::Tensor& grad) { return grad.defined(); });
    if (used == grads.end()) {
      return false;
    }
    const auto like = *used;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) {
        grads[i] = at::zeros({sizes[0], sizes[1], counts[i], like.size(3)}, like.options());
      }
    }
    return true;
  }
};

#ifdef DDP_HAS_CUDA
/// Whether cosines or sines broadcast to `x` and have a whole head side by side.
bool fits_heads(const at::Tensor& angles, const at::Tensor& x) {
  if (angles.dim() == 0 || angles.dim() > x.dim() || angles.size(-1) != x.size(-1) ||
      angles.stride(-1) != 1 || angles.device() != x.device()) {
    return false;
  }
  for (int64_t dim = 2; dim <= angles.dim(); ++dim) {
    if (angles.size(-dim) != 1 && angles.size(-dim) != x.size(-dim)) {
      return false;
    }
  }
  return true;
}

bool fits_rotary_kernel(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const bool is_float = x.scalar_type() == at::kFloat && detail::runs_own_code(x);
  return (is_float || detail::runs_own_kernels(x, x.scalar_type())) && x.dim() == 4 &&
         x.stride(3) == 1 && x.numel() > 0 && x.numel() < int64_t{1} << 32 &&
         (cos.scalar_type() == x.scalar_type() || cos.scalar_type() == at::kFloat) &&
         sin.scalar_type() == cos.scalar_type() && fits_heads(cos, x) && fits_heads(sin, x) &&
         !(c10::GradMode::is_enabled() && (cos.requires_grad() || sin.requires_grad()));
}

/// Writes `x` [batch, heads, seq, head_dim], rotated, into `out`, whose strides may be others.
void rotate_by_kernel(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      bool backward, const at::Tensor& out) {
  const auto cosines = cos.expand(x.sizes()), sines = sin.expand(x.sizes());
  std::array<int64_t, 3> dims = {0, 1, 2};  // neighbouring threads write neighbouring rows
  std::sort(dims.begin(), dims.end(),
            [&](int64_t a, int64_t b) { return out.stride(a) > out.stride(b); });
  detail::RotaryRows rows{.half = static_cast<uint32_t>(x.size(3) / 2),
                          .in = detail::element_of(x.scalar_type()),
                          .out = detail::element_of(out.scalar_type()),
                          .is_aligned = x.size(3) % 16 == 0};
  const auto operand = [&](const at::Tensor& tensor) {
    detail::RotaryOperand result{.data = tensor.const_data_ptr()};
    rows.is_aligned = rows.is_aligned && detail::is_aligned(tensor);
    for (std::size_t i = 0; i < 3; ++i) {
      result.strides[i] = tensor.stride(dims[i]);
      rows.is_aligned = rows.is_aligned && result.strides[i] % 8 == 0;
    }
    return result;
  };
  rows.x = operand(x);
  rows.cos = operand(cosines);
  rows.sin = operand(sines);
  const auto to = operand(out);
  for (std::size_t i = 0; i < 3; ++i) {
    rows.sizes[i] = static_cast<uint32_t>(x.size(dims[i]));
    rows.out_strides[i] = to.strides[i];
  }
  const c10::cuda::CUDAGuard device(x.device());
  C10_CUDA_CHECK(
      detail::launch_apply_rotary(rows, backward, out.mutable_data_ptr(), detail::stream_of(x)));
}

class ApplyRotary : public torch::autograd::Function<ApplyRotary> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& cos, const at::Tensor& sin) {
    const auto out = at::empty_like(x, at::promote_types(x.scalar_type(), cos.scalar_type()));
    rotate_by_kernel(x, cos, sin, /*backward=*/false, out);
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["strides"] = out.strides().vec();
    ctx->saved_data["dtype"] = x.scalar_type();
    ctx->set_materialize_grads(false);
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("apply_rotary");
    if (!grad_outputs[0].defined()) {
      return torch::autograd::variable_list(3);
    }
    const auto grad =
        grad_outputs[0].stride(3) == 1 ? grad_outputs[0] : grad_outputs[0].contiguous();
    const auto saved = ctx->get_saved_variables();
    const auto grad_x =
        at::empty_strided(grad.sizes(), ctx->saved_data["strides"].toIntVector(),
                          grad.options().dtype(ctx->saved_data["dtype"].toScalarType()));
    rotate_by_kernel(grad, saved[0], saved[1], /*backward=*/true, grad_x);
    return {grad_x, at::Tensor(), at::Tensor()};
  }
};
#endif

}  // namespace

at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) % 2 == 0, "apply_rotary: the last dimension of ", x.sizes(),
              " does not have two equal halves");
#ifdef DDP_HAS_CUDA
  if (fits_rotary_kernel(x, cos, sin)) {
    return ApplyRotary::apply(x, cos, sin);
  }
#endif
  const int64_t half = x.size(-1) / 2;
  const auto straight = x * cos;
  const auto first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
  return straight + at::cat({-second, first}, -1) * sin;
}

RotaryTables make_rotary_tables(const RotaryOptions& options, int64_t num_positions,
                                at::Device device) {
  const auto frequencies = inverse_frequencies(options);
  const auto positions = at::arange(num_positions, at::kFloat);
  const auto angles = at::outer(positions, frequencies);
  return {angles.cos().to(device), angles.sin().to(device)};
}

RotaryAngles rotary_angles(const RotaryTables& tables, const at::Tensor& positions) {
  const auto take = [&](const at::Tensor& table) {
    auto shape = positions.sizes().vec();
    shape.insert(shape.end(), {1, table.size(1)});
    return table.index_select(0, positions.reshape({-1})).view(shape);
  };
  return {take(tables.cos), take(tables.sin)};
}

AttentionHeads split_heads(const at::Tensor& qkv, int64_t heads, int64_t kv_heads,
                           const SplitHeadsOptions& options) {
  TORCH_CHECK(
      qkv.dim() == 3 && heads > 0 && kv_heads > 0 && qkv.size(2) % (heads + 2 * kv_heads) == 0,
      "split_heads: qkv ", qkv.sizes(), " is not [batch, seq, (", heads, " + 2 * ", kv_heads,
      ") * head_dim]");
  const auto& [angles, bias] = options;
  if (angles.cos.defined()) {
    detail::check_same_device("split_heads", qkv, "cos", angles.cos);
    detail::check_same_device("split_heads", qkv, "sin", angles.sin);
  }
  if (bias.defined()) {
    TORCH_CHECK(bias.sizes() == at::IntArrayRef(qkv.size(2)), "split_heads: added_bias ",
                bias.sizes(), " does not fit qkv ", qkv.sizes());
    detail::check_same_device("split_heads", qkv, "added_bias", bias);
  }
  const auto dense = [](const at::Tensor& table) {
    return table.defined() ? std::optional(table.contiguous()) : std::nullopt;
  };
  const auto split =
      SplitHeads::apply(qkv.contiguous(), dense(angles.cos), dense(angles.sin),
                        bias.defined() ? std::optional(bias) : std::nullopt, heads, kv_heads);
  return {split[0], split[1], split[2]};
}

}  // namespace ddp::ops
