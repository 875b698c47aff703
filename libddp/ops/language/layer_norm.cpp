// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "ddp/ops/language.hpp"
#include "ops/grad_target.hpp"
#include "ops/language/dropout.hpp"
#include "ops/shared/autocast_off.hpp"
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

float* floats_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

/// A branch that is added to a residual before the norm; without residual there is none.
struct Branch {
  at::Tensor residual{}, bias{};
  double dropout_p = 0;
};

/// Without a bias this is RMSNorm, which takes no branch.
class Norm : public torch::autograd::Function<Norm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x_in,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias_in,
                               const std::optional<at::Tensor>& branch_bias,
                               const std::optional<at::Tensor>& residual_in, double eps, double p) {
    const c10::cuda::CUDAGuard device(x_in.device());
    const auto x = detail::dense(x_in);
    const auto bias = bias_in.value_or(at::Tensor());
    const auto residual = residual_in ? detail::dense(*residual_in) : at::Tensor();
    const bool is_rms = !bias.defined(), adds = residual.defined();
    const auto shape = rows_of(x, weight, is_rms, eps);
    const auto y = at::empty_like(x);
    const auto sum = adds ? at::empty_like(x) : x;
    const auto numbers = x.options().dtype(at::kFloat);
    const auto rstd = at::empty({shape.rows}, numbers);
    const auto mean = is_rms ? at::Tensor() : at::empty({shape.rows}, numbers);
    at::Tensor drawn;
    const detail::NormBranch branch = {
        .residual = detail::data_or_null(residual),
        .bias = branch_bias ? branch_bias->const_data_ptr() : nullptr,
        .draws = detail::new_draws(p, x.device(), drawn)};
    C10_CUDA_CHECK(detail::launch_layer_norm(
        shape, branch, x.const_data_ptr(), weight.const_data_ptr(), detail::data_or_null(bias),
        adds ? sum.mutable_data_ptr() : nullptr, y.mutable_data_ptr(), floats_or_null(mean),
        floats_or_null(rstd), detail::stream_of(x)));
    ctx->save_for_backward(
        {sum, weight, bias, mean, rstd, branch_bias.value_or(at::Tensor()), drawn});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["p"] = p;
    ctx->saved_data["adds"] = adds;
    ctx->set_materialize_grads(false);
    return {y, adds ? sum : x_in};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("layer_norm");
    const bool adds = ctx->saved_data["adds"].toBool();
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &bias = saved[2], &branch_bias = saved[5];
    const c10::cuda::CUDAGuard device(x.device());
    const auto shape = rows_of(x, weight, !bias.defined(), ctx->saved_data["eps"].toDouble());
    const auto draws = detail::repeated_draws(ctx->saved_data["p"].toDouble(), saved[6]);
    const auto [wants_x, wants_weight, wants_bias, wants_branch_bias, wants_residual] =
        detail::wanted_gradients(ctx, {true, true, bias.defined(), branch_bias.defined(), adds});
    if (!grad_outputs[0].defined()) {  // only the sum was used, or nothing
      return gradients_of_sum(grad_outputs[1], adds, draws, branch_bias, wants_branch_bias);
    }
    const auto grad = detail::dense(grad_outputs[0]);
    const auto skip = grad_outputs[1].defined() ? detail::dense(grad_outputs[1]) : at::Tensor();
    const int num_parts = detail::num_norm_parts(
        shape, at::cuda::getDeviceProperties(x.device().index())->multiProcessorCount);
    const auto new_parts = [&](bool wanted) {
      return wanted ? at::empty({num_parts, shape.dim}, x.options().dtype(at::kFloat))
                    : at::Tensor();
    };
    const auto weight_sums = new_parts(wants_weight), bias_sums = new_parts(wants_bias),
               branch_sums = new_parts(wants_branch_bias);
    const auto grad_x = at::empty_like(x);
    const auto grad_branch = draws.threshold > 0 ? at::empty_like(x) : grad_x;
    const auto stream = detail::stream_of(x);
    C10_CUDA_CHECK(detail::launch_layer_norm_backward(
        shape, adds, draws, grad.const_data_ptr(), detail::data_or_null(skip), x.const_data_ptr(),
        weight.const_data_ptr(), floats_or_null(saved[3]), floats_or_null(saved[4]),
        grad_x.mutable_data_ptr(), grad_branch.mutable_data_ptr(),
        {floats_or_null(weight_sums), floats_or_null(bias_sums), floats_or_null(branch_sums)},
        num_parts, stream));
    const auto add_parts = [&](const at::Tensor& sums, const at::Tensor& parameter) {
      const auto target = detail::grad_target(parameter, sums.defined());
      if (target.memory.defined()) {
        C10_CUDA_CHECK(detail::launch_add_parts(sums.const_data_ptr<float>(), num_parts, shape.dim,
                                                detail::grad_out(target), stream));
      }
      return target.result();
    };
    return {grad_branch,
            add_parts(weight_sums, weight),
            add_parts(bias_sums, bias),
            add_parts(branch_sums, branch_bias),
            adds ? grad_x : at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }

 private:
  /// Where no gradient reaches the norm, it has none for its weight and bias.
  static variable_list gradients_of_sum(const at::Tensor& grad, bool adds,
                                        const detail::DropoutDraws& draws,
                                        const at::Tensor& branch_bias, bool wants_branch_bias) {
    if (!grad.defined() || !adds) {
      return {grad, {}, {}, {}, {}, {}, {}};
    }
    const auto of_branch = detail::branch_gradients(grad, draws, branch_bias, wants_branch_bias);
    return {of_branch.branch, {}, {}, of_branch.bias, grad, {}, {}};
  }
};

NormedResidual norm_by_kernel(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                              double eps, const Branch& branch = {}) {
  const auto outputs =
      Norm::apply(x, weight, detail::optional_of(bias), detail::optional_of(branch.bias),
                  detail::optional_of(branch.residual), eps, branch.dropout_p);
  return {outputs[0], outputs[1]};
}
#endif

}  // namespace

NormedResidual layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          double eps) {
  check_norm("layer_norm", x, "weight", weight);
  check_norm("layer_norm", x, "bias", bias);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(x, weight, bias)) {
    return norm_by_kernel(x, weight, bias, eps);
  }
#endif
  return {at::layer_norm(x, weight.sizes(), weight, bias, eps), x};
}

NormedResidual add_layer_norm(const at::Tensor& branch, const at::Tensor& residual,
                              const at::Tensor& weight, const at::Tensor& bias, double eps,
                              const BranchOptions& options) {
  TORCH_CHECK(residual.defined(), "add_layer_norm: the residual is undefined");
  detail::check_branch("add_layer_norm", branch, residual, options);
  check_norm("add_layer_norm", branch, "weight", weight);
  check_norm("add_layer_norm", branch, "bias", bias);
#ifdef DDP_HAS_CUDA
  // The kernel reads all vectors in the dtype of the norm's weight.
  const auto branch_bias =
      options.bias.defined() ? detail::dense(options.bias.to(weight.scalar_type())) : at::Tensor();
  if (residual.scalar_type() == branch.scalar_type() && fits_kernels(branch, weight, bias)) {
    return norm_by_kernel(branch, weight, bias, eps, {residual, branch_bias, options.dropout_p});
  }
#endif
  return layer_norm(detail::add_branch_by_aten(branch, residual, options), weight, bias, eps);
}

NormedResidual rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_norm("rms_norm", x, "weight", weight);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(x, weight, {})) {
    return norm_by_kernel(x, weight, {}, eps);
  }
#endif
  return {at::rms_norm(x, weight.sizes(), weight, eps), x};
}

}  // namespace ddp::ops
