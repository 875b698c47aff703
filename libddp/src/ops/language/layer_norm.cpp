// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "ddp/ops/language.hpp"
#include "ops/autocast_off.hpp"
#include "ops/grad_target.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/column_sums.hpp"
#include "ops/language/layer_norm_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

void check_norm(const char* op, const at::Tensor& x, const char* name,
                const at::Tensor& parameter) {
  TORCH_CHECK(parameter.defined(), op, ": the ", name, " is undefined");
  TORCH_CHECK(x.dim() > 0 && parameter.dim() == 1 && parameter.size(0) == x.size(-1), op, ": ",
              name, " ", parameter.sizes(), " does not fit the last dimension of ", x.sizes());
  detail::check_same_device(op, x, name, parameter);
}

#ifdef DDP_HAS_CUDA
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool fits_kernels(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto fits = [&](const at::Tensor& parameter) {
    return !parameter.defined() ||
           (parameter.is_contiguous() && detail::is_aligned(parameter) &&
            (parameter.scalar_type() == at::kFloat || parameter.scalar_type() == x.scalar_type()));
  };
  return detail::runs_own_kernels(x, x.scalar_type()) && x.numel() > 0 && x.size(-1) % 8 == 0 &&
         x.size(-1) <= detail::kMaxNormDim && fits(weight) && fits(bias) &&
         (!bias.defined() || bias.scalar_type() == weight.scalar_type());
}

detail::NormRows rows_of(const at::Tensor& x, const at::Tensor& weight, bool is_rms, double eps) {
  return {.rows = x.numel() / x.size(-1),
          .dim = x.size(-1),
          .element = detail::element_of(x.scalar_type()),
          .weights = detail::element_of(weight.scalar_type()),
          .is_rms = is_rms,
          .eps = static_cast<float>(eps)};
}

const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

float* floats_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

/// Without a bias this is RMSNorm.
class Norm : public torch::autograd::Function<Norm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x_in,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias_in,
                               double eps) {
    const auto bias = bias_in.value_or(at::Tensor());
    const c10::cuda::CUDAGuard device(x_in.device());
    const auto x = detail::dense(x_in);
    const bool is_rms = !bias.defined();
    const auto shape = rows_of(x, weight, is_rms, eps);
    const auto y = at::empty_like(x);
    const auto numbers = x.options().dtype(at::kFloat);
    const auto rstd = at::empty({shape.rows}, numbers);
    const auto mean = is_rms ? at::Tensor() : at::empty({shape.rows}, numbers);
    C10_CUDA_CHECK(detail::launch_layer_norm(
        shape, x.const_data_ptr(), weight.const_data_ptr(), data_or_null(bias),
        y.mutable_data_ptr(), floats_or_null(mean), floats_or_null(rstd), detail::stream_of(x)));
    ctx->save_for_backward({x, weight, bias, mean, rstd});
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return {y, x_in};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("layer_norm");
    if (!grad_outputs[0].defined()) {
      return {grad_outputs[1], at::Tensor(), at::Tensor(), at::Tensor()};
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &bias = saved[2];
    const c10::cuda::CUDAGuard device(x.device());
    const auto shape = rows_of(x, weight, !bias.defined(), ctx->saved_data["eps"].toDouble());
    const auto grad = detail::dense(grad_outputs[0]);
    const auto skip = grad_outputs[1].defined() ? detail::dense(grad_outputs[1]) : at::Tensor();
    const int parts = detail::num_norm_parts(
        shape, at::cuda::getDeviceProperties(x.device().index())->multiProcessorCount);
    const auto new_parts = [&](bool wanted) {
      return wanted ? at::empty({parts, shape.dim}, x.options().dtype(at::kFloat)) : at::Tensor();
    };
    const auto weight_parts = new_parts(ctx->needs_input_grad(1));
    const auto bias_parts = new_parts(bias.defined() && ctx->needs_input_grad(2));
    const auto grad_x = at::empty_like(x);
    const auto stream = detail::stream_of(x);
    C10_CUDA_CHECK(detail::launch_layer_norm_backward(
        shape, grad.const_data_ptr(), data_or_null(skip), x.const_data_ptr(),
        weight.const_data_ptr(), floats_or_null(saved[3]), floats_or_null(saved[4]),
        grad_x.mutable_data_ptr(), floats_or_null(weight_parts), floats_or_null(bias_parts), parts,
        stream));
    const auto add_parts = [&](const at::Tensor& sums, const at::Tensor& parameter) {
      const auto target = detail::grad_target(parameter, sums.defined());
      if (target.memory.defined()) {
        C10_CUDA_CHECK(detail::launch_add_parts(sums.const_data_ptr<float>(), parts, shape.dim,
                                                detail::grad_out(target), stream));
      }
      return target.result();
    };
    return {grad_x, add_parts(weight_parts, weight), add_parts(bias_parts, bias), at::Tensor()};
  }
};
#endif

}  // namespace

NormedResidual layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          double eps) {
  check_norm("layer_norm", x, "weight", weight);
  check_norm("layer_norm", x, "bias", bias);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(x, weight, bias)) {
    const auto outputs = Norm::apply(x, weight, std::optional(bias), eps);
    return {outputs[0], outputs[1]};
  }
#endif
  return {at::layer_norm(x, weight.sizes(), weight, bias, eps), x};
}

NormedResidual rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_norm("rms_norm", x, "weight", weight);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(x, weight, {})) {
    const auto outputs = Norm::apply(x, weight, std::optional<at::Tensor>(), eps);
    return {outputs[0], outputs[1]};
  }
#endif
  return {at::rms_norm(x, weight.sizes(), weight, eps), x};
}

}  // namespace ddp::ops
