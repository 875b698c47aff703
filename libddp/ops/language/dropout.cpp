// SPDX-License-Identifier: Apache-2.0
#include "ops/language/dropout.hpp"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>

#include "ddp/ops/language.hpp"
#include "ops/grad_target.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include "ops/language/column_sums.hpp"
#include "ops/language/dropout_kernels.hpp"
#endif

namespace ddp::ops {
namespace detail {

void check_branch(const char* op, const at::Tensor& branch, const at::Tensor& residual,
                  const BranchOptions& options) {
  const double p = options.dropout_p;
  TORCH_CHECK(p >= 0 && p < 1, op, ": dropout_p = ", p, ": it must be at least 0 and below 1");
  if (residual.defined()) {
    TORCH_CHECK(residual.sizes() == branch.sizes(), op, ": residual ", residual.sizes(),
                " differs from the branch ", branch.sizes());
    check_same_device(op, branch, "residual", residual);
  }
  if (options.bias.defined()) {
    TORCH_CHECK(branch.dim() > 0 && options.bias.sizes() == at::IntArrayRef(branch.size(-1)), op,
                ": bias ", options.bias.sizes(), " does not fit the branch ", branch.sizes());
    check_same_device(op, branch, "bias", options.bias);
  }
}

at::Tensor add_branch_by_aten(const at::Tensor& branch, const at::Tensor& residual,
                              const BranchOptions& options) {
  auto sum = options.bias.defined() ? branch + options.bias.to(branch.scalar_type()) : branch;
  if (options.dropout_p > 0) {
    sum = at::dropout(sum, options.dropout_p, true);
  }
  return residual.defined() ? residual + sum : sum;
}

#ifdef DDP_HAS_CUDA
namespace {

BranchRows rows_of(const at::Tensor& branch, const at::Tensor& bias) {
  const auto element = element_of(branch.scalar_type());
  return {.rows = branch.numel() / branch.size(-1),
          .columns = branch.size(-1),
          .element = element,
          .bias = bias.defined() ? element_of(bias.scalar_type()) : element};
}

/// With the probability rounded to a multiple of 2^-16, but not to 0, and the scale for that.
DropoutDraws draws_of(double p) {
  constexpr double kNumbers = 65536;
  const double threshold = p > 0 ? std::clamp(std::round(p * kNumbers), 1.0, kNumbers - 1) : 0;
  return {.threshold = static_cast<uint32_t>(threshold),
          .scale = static_cast<float>(1.0 / (1.0 - threshold / kNumbers))};
}

}  // namespace

DropoutDraws new_draws(double p, at::Device device, at::Tensor& drawn, uint64_t calls) {
  auto draws = draws_of(p);
  if (draws.threshold == 0) {
    return draws;
  }
  drawn = at::empty({2}, at::TensorOptions().dtype(at::kLong).device(device));
  draws.drawn = drawn.mutable_data_ptr<int64_t>();
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const auto state = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(
      calls * kDrawsOfThread);
  if (state.captured_) {
    draws.device_seed = state.seed_.ptr;
    draws.device_offset = state.offset_.ptr;
    draws.offset = state.offset_intragraph_;
  } else {
    draws.seed = state.seed_.val;
    draws.offset = state.offset_.val;
  }
  return draws;
}

DropoutDraws repeated_draws(double p, const at::Tensor& drawn) {
  auto draws = draws_of(p);
  if (draws.threshold > 0) {
    draws.device_seed = drawn.const_data_ptr<int64_t>();
    draws.device_offset = draws.device_seed + 1;
  }
  return draws;
}

BranchGradients branch_gradients(const at::Tensor& grad_in, const DropoutDraws& draws,
                                 const at::Tensor& bias, bool wants_bias) {
  const c10::cuda::CUDAGuard device(grad_in.device());
  const auto grad = dense(grad_in);
  const auto shape = rows_of(grad, bias);
  const auto target = grad_target(bias, wants_bias);
  const int parts = num_column_parts(shape.rows, shape.columns);
  const auto sums = wants_bias ? at::empty({parts, shape.columns}, grad.options().dtype(at::kFloat))
                               : at::Tensor();
  const auto out = at::empty_like(grad);
  const auto stream = stream_of(grad);
  C10_CUDA_CHECK(
      launch_add_branch_backward(shape, grad.const_data_ptr(), draws, out.mutable_data_ptr(),
                                 wants_bias ? sums.mutable_data_ptr<float>() : nullptr, stream));
  if (wants_bias) {
    C10_CUDA_CHECK(launch_add_parts(sums.const_data_ptr<float>(), parts, shape.columns,
                                    grad_out(target), stream));
  }
  return {out, target.result()};
}
#endif

}  // namespace detail

namespace {

#ifdef DDP_HAS_CUDA
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool fits_branch_kernels(const at::Tensor& branch, const at::Tensor& residual,
                         const BranchOptions& options) {
  const auto dtype = branch.scalar_type();
  return options.dropout_p > 0 && detail::runs_own_kernels(branch, dtype) && branch.numel() > 0 &&
         branch.size(-1) % 8 == 0 && (!residual.defined() || residual.scalar_type() == dtype) &&
         (!options.bias.defined() || options.bias.scalar_type() == dtype ||
          options.bias.scalar_type() == at::kFloat);
}

class AddBranch : public torch::autograd::Function<AddBranch> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& branch_in,
                            const std::optional<at::Tensor>& bias_in,
                            const std::optional<at::Tensor>& residual_in, double p) {
    const c10::cuda::CUDAGuard device(branch_in.device());
    const auto branch = detail::dense(branch_in);
    const auto residual = residual_in ? detail::dense(*residual_in) : at::Tensor();
    const auto bias = bias_in ? detail::dense(*bias_in) : at::Tensor();
    const auto out = at::empty_like(branch);
    at::Tensor drawn;
    const auto draws = detail::new_draws(p, branch.device(), drawn);
    C10_CUDA_CHECK(detail::launch_add_branch(
        detail::rows_of(branch, bias), branch.const_data_ptr(), detail::data_or_null(bias),
        detail::data_or_null(residual), draws, out.mutable_data_ptr(), detail::stream_of(branch)));
    ctx->save_for_backward({bias_in.value_or(at::Tensor()), drawn});
    ctx->saved_data["p"] = p;
    ctx->saved_data["adds"] = residual_in.has_value();
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("add_branch");
    if (!grad_outputs[0].defined()) {
      return variable_list(4);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &bias = saved[0], &drawn = saved[1];
    const double p = ctx->saved_data["p"].toDouble();
    const auto gradients =
        detail::branch_gradients(grad_outputs[0], detail::repeated_draws(p, drawn), bias,
                                 bias.defined() && ctx->needs_input_grad(1));
    const bool adds = ctx->saved_data["adds"].toBool();
    return {gradients.branch, gradients.bias, adds ? grad_outputs[0] : at::Tensor(), at::Tensor()};
  }
};
#endif

}  // namespace

at::Tensor add_branch(const at::Tensor& branch, const at::Tensor& residual,
                      const BranchOptions& options) {
  detail::check_branch("add_branch", branch, residual, options);
#ifdef DDP_HAS_CUDA
  if (fits_branch_kernels(branch, residual, options)) {
    return AddBranch::apply(branch, detail::optional_of(options.bias),
                            detail::optional_of(residual), options.dropout_p);
  }
#endif
  return detail::add_branch_by_aten(branch, residual, options);
}

at::Tensor dropout(const at::Tensor& x, double p) {
  return add_branch(x, {}, {.dropout_p = p});
}

}  // namespace ddp::ops
