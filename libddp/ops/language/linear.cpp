// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "ddp/ops/language.hpp"
#include "ops/gemm/gemm.hpp"
#include "ops/grad_target.hpp"
#include "ops/language/dropout.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/column_sums.hpp"
#endif

namespace ddp::ops {
namespace {

std::vector<int64_t> result_sizes(const at::Tensor& input, const at::Tensor& weight,
                                  bool transposed) {
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(transposed ? 1 : 0);
  return sizes;
}

at::Tensor by_aten(const at::Tensor& input, const at::Tensor& weight,
                   const LinearOptions& options) {
  const auto shape = result_sizes(input, weight, options.transposed);
  const auto rows = input.reshape({-1, input.size(-1)});
  const auto matrix = options.transposed ? weight : weight.t();
  const auto product =
      options.bias.defined() ? at::addmm(options.bias, rows, matrix) : at::mm(rows, matrix);
  const auto result = product.view(shape);
  return options.residual.defined() ? options.residual + result : result;
}

void check_shapes(const at::Tensor& input, const at::Tensor& weight, const LinearOptions& options) {
  TORCH_CHECK(input.dim() > 0 && weight.dim() == 2 &&
                  input.size(-1) == weight.size(options.transposed ? 0 : 1),
              "linear: input ", input.sizes(), " does not fit weight ", weight.sizes(),
              options.transposed ? " (transposed)" : "");
  detail::check_same_device("linear", input, "weight", weight);
  const auto shape = result_sizes(input, weight, options.transposed);
  if (options.bias.defined()) {
    TORCH_CHECK(options.bias.sizes() == at::IntArrayRef(shape.back()), "linear: bias ",
                options.bias.sizes(), " does not fit weight ", weight.sizes());
    detail::check_same_device("linear", input, "bias", options.bias);
  }
  if (options.residual.defined()) {
    TORCH_CHECK(options.residual.sizes() == at::IntArrayRef(shape), "linear: residual ",
                options.residual.sizes(), " differs from the result ", shape);
    detail::check_same_device("linear", input, "residual", options.residual);
  }
}

#ifdef DDP_HAS_CUDA
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)}).contiguous();
}

/// target = beta target + the sum of the rows of `grad`.
void write_bias_gradient(const at::Tensor& grad, const detail::GradTarget& target) {
  const auto scratch =
      at::empty({detail::num_column_parts(grad.size(0), grad.size(1)), grad.size(1)},
                grad.options().dtype(at::kFloat));
  C10_CUDA_CHECK(detail::launch_column_sums(
      grad.const_data_ptr(), detail::element_of(grad.scalar_type()), grad.size(0), grad.size(1),
      scratch.mutable_data_ptr<float>(), detail::grad_out(target), detail::stream_of(grad)));
}

/// Row-major or column-major.
at::Tensor as_factor(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

// The residual is the product's C matrix, so adding it costs its reading only. `cast` is the weight
// in the dtype of the product.
class Linear : public torch::autograd::Function<Linear> {
 public:
  /// The product, and with `passes` also the input.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                               const std::optional<at::Tensor>& residual, const at::Tensor& cast,
                               bool transposed, bool skips_result, bool passes) {
    const c10::cuda::CUDAGuard device(input.device());
    const AutocastOff no_autocast(at::kCUDA);
    const auto dtype = cast.scalar_type();
    const auto x = rows_of(input.to(dtype));
    const auto shape = result_sizes(input, cast, transposed);
    const auto out = at::empty(shape, x.options());
    detail::GemmOptions options;
    if (bias) {
      options.bias = bias->to(dtype);
    }
    if (residual) {
      options.addend = rows_of(*residual);
    }
    if (!skips_result) {
      detail::gemm(out.view({-1, shape.back()}), x, transposed ? cast : cast.t(), options);
    }
    // A frozen weight's gradient needs no x, a first layer's none of its input no weight.
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor(),
                            input.requires_grad() ? cast : at::Tensor(), weight,
                            bias.value_or(at::Tensor())});
    ctx->saved_data["adds"] = residual.has_value();
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["input_dtype"] = input.scalar_type();
    ctx->saved_data["input_sizes"] = input.sizes().vec();
    ctx->set_materialize_grads(false);
    return passes ? variable_list{out, detail::alias_of(input)} : variable_list{out};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("linear");
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &cast = saved[1], &weight = saved[2], &bias = saved[3];
    const c10::cuda::CUDAGuard device(weight.device());
    const AutocastOff no_autocast(at::kCUDA);
    const bool transposed = ctx->saved_data["transposed"].toBool();
    const auto passed = grad_outputs.size() > 1 ? grad_outputs[1] : at::Tensor();
    if (!grad_outputs[0].defined()) {  // only the residual was used
      return {passed, {}, {}, {}, {}, {}, {}, {}};
    }
    const auto grad = detail::dense(rows_of(grad_outputs[0]));
    at::Tensor grad_input;
    if (ctx->needs_input_grad(0)) {
      const auto sizes = ctx->saved_data["input_sizes"].toIntVector();
      grad_input = at::empty(sizes, grad.options());
      detail::gemm(grad_input.view({-1, sizes.back()}), grad, transposed ? cast.t() : cast,
                   {.addend = passed.defined() ? rows_of(passed) : at::Tensor()});
      grad_input = grad_input.to(ctx->saved_data["input_dtype"].toScalarType());
    }
    const auto weight_target = detail::grad_target(weight, ctx->needs_input_grad(1));
    if (weight_target.memory.defined()) {
      transposed ? detail::gemm_into(weight_target, x.t(), grad)
                 : detail::gemm_into(weight_target, grad.t(), x);
    }
    const auto bias_target = detail::grad_target(bias, bias.defined() && ctx->needs_input_grad(2));
    if (bias_target.memory.defined()) {
      write_bias_gradient(grad, bias_target);
    }
    const bool adds = ctx->saved_data["adds"].toBool();
    return {grad_input,           weight_target.result(),
            bias_target.result(), adds ? grad_outputs[0] : at::Tensor(),
            at::Tensor(),         at::Tensor(),
            at::Tensor(),         at::Tensor()};
  }
};

// Other sizes would leave cublasLt without its fast algorithms.
bool fits_products(const at::Tensor& input, const at::Tensor& weight) {
  const bool has_vectors = weight.size(0) % 8 == 0 && weight.size(1) % 8 == 0;
  const auto dtype = detail::compute_dtype(input, input.scalar_type());
  const bool is_float = dtype == at::kFloat && weight.scalar_type() == at::kFloat &&
                        detail::runs_float32_products(input);
  return has_vectors && input.numel() > 0 && weight.numel() > 0 &&
         (is_float || detail::runs_own_kernels(input, dtype));
}

LinearResidual by_products(const at::Tensor& input, const at::Tensor& weight,
                           const LinearOptions& options, bool passes) {
  const auto device = input.device().type();
  const auto dtype = detail::compute_dtype(input, input.scalar_type());
  // Autocast keeps the cast weight until its scope ends.
  const auto cast = at::autocast::is_autocast_enabled(device)
                        ? at::autocast::cached_cast(dtype, weight, device)
                        : weight.to(dtype);
  const auto& residual = options.residual;
  const bool adds = residual.defined() && residual.scalar_type() == dtype;
  // The gradient of an input of another dtype is not the product's.
  const bool can_pass = passes && input.scalar_type() == dtype && input.requires_grad();
  const auto outputs =
      Linear::apply(input, weight, detail::optional_of(options.bias),
                    detail::optional_of(adds ? residual : at::Tensor()), as_factor(cast.detach()),
                    options.transposed, options.skips_result, can_pass);
  const auto product = residual.defined() && !adds ? residual + outputs[0] : outputs[0];
  return {product, can_pass ? outputs[1] : input};
}

#endif

}  // namespace

LinearResidual linear_and_residual(const at::Tensor& input, const at::Tensor& weight,
                                   const LinearOptions& options) {
  check_shapes(input, weight, options);
#ifdef DDP_HAS_CUDA
  if (fits_products(input, weight)) {
    return by_products(input, weight, options, /*passes=*/true);
  }
#endif
  return {by_aten(input, weight, options), input};
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const LinearOptions& options) {
  check_shapes(input, weight, options);
#ifdef DDP_HAS_CUDA
  if (fits_products(input, weight)) {
    return by_products(input, weight, options, /*passes=*/false).product;
  }
#endif
  return by_aten(input, weight, options);
}

}  // namespace ddp::ops
