// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

#include "ops/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
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

#ifdef DDP_HAS_CUDA
/// Heads of whole 16-byte parts, at any distance, whose last dimension is dense.
bool fits_kernel(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto holds_vectors = [&](int64_t dimension) { return x.stride(dimension) % 8 == 0; };
  return detail::runs_own_kernels(x, x.scalar_type()) && x.dim() == 4 && x.numel() > 0 &&
         x.stride(3) == 1 && x.size(3) % 16 == 0 && holds_vectors(0) && holds_vectors(1) &&
         holds_vectors(2) && detail::is_aligned(x) && cos.is_contiguous() && sin.is_contiguous() &&
         cos.scalar_type() == at::kFloat &&
         cos.numel() == x.size(0) * x.size(1) * (x.size(3) / 2) && sin.numel() == cos.numel();
}

at::Tensor rotate_by_kernel(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool opposite) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto out = at::empty(x.sizes(), x.options());
  C10_CUDA_CHECK(detail::launch_rotary({.batch = x.size(0),
                                        .seq = x.size(1),
                                        .heads = x.size(2),
                                        .head_dim = x.size(3),
                                        .batch_stride = x.stride(0),
                                        .seq_stride = x.stride(1),
                                        .head_stride = x.stride(2),
                                        .element = detail::element_of(x.scalar_type())},
                                       x.const_data_ptr(), cos.const_data_ptr<float>(),
                                       sin.const_data_ptr<float>(), opposite,
                                       out.mutable_data_ptr(), detail::stream_of(x)));
  return out;
}
#endif

/// [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]; `direction` -1 is the inverse.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  double direction) {
#ifdef DDP_HAS_CUDA
  if (!at::GradMode::is_enabled() && fits_kernel(x, cos, sin)) {  // enabled: create_graph=true
    return rotate_by_kernel(x, cos, sin, direction < 0);
  }
#endif
  const int64_t half = x.size(-1) / 2;
  const auto x1 = x.narrow(-1, 0, half), x2 = x.narrow(-1, half, half);
  auto output = at::empty(x.sizes(), x.options());
  output.narrow(-1, 0, half).copy_((x1 * cos).addcmul_(x2, sin, -direction));
  output.narrow(-1, half, half).copy_((x2 * cos).addcmul_(x1, sin, direction));
  return output;
}

class ApplyRotary : public torch::autograd::Function<ApplyRotary> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& cos, const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotate(x, cos, sin, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const AutocastOff no_autocast(saved[0].device().type());
    return {rotate(grad_outputs[0], saved[0], saved[1], -1), {}, {}};
  }
};

}  // namespace

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

at::Tensor apply_rotary(const at::Tensor& x, const RotaryAngles& angles) {
  detail::check_same_device("apply_rotary", x, "cos", angles.cos);
  detail::check_same_device("apply_rotary", x, "sin", angles.sin);
  return ApplyRotary::apply(x, angles.cos, angles.sin);
}

}  // namespace ddp::ops
