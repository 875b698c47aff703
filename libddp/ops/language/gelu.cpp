// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "ddp/ops/language.hpp"
#include "ops/grad_target.hpp"
#include "ops/language/dropout.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/column_sums.hpp"
#include "ops/language/gelu_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

#ifdef DDP_HAS_CUDA
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool fits_gelu_kernels(const at::Tensor& x, const at::Tensor& bias) {
  return detail::runs_own_kernels(x, x.scalar_type()) && x.numel() > 0 && x.size(-1) % 8 == 0 &&
         (!bias.defined() || bias.scalar_type() == x.scalar_type() ||
          bias.scalar_type() == at::kFloat);
}

detail::GeluRows rows_of(const at::Tensor& x, const at::Tensor& bias, bool is_tanh) {
  const auto element = detail::element_of(x.scalar_type());
  return {.rows = x.numel() / x.size(-1),
          .columns = x.size(-1),
          .element = element,
          .bias = bias.defined() ? detail::element_of(bias.scalar_type()) : element,
          .is_tanh = is_tanh};
}

class Gelu : public torch::autograd::Function<Gelu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in,
                            const std::optional<at::Tensor>& bias_in, bool is_tanh) {
    const c10::cuda::CUDAGuard device(x_in.device());
    const auto x = detail::dense(x_in);
    const auto bias = bias_in ? detail::dense(*bias_in) : at::Tensor();
    const auto out = at::empty_like(x);
    C10_CUDA_CHECK(detail::launch_gelu(rows_of(x, bias, is_tanh), x.const_data_ptr(),
                                       detail::data_or_null(bias), out.mutable_data_ptr(),
                                       detail::stream_of(x)));
    ctx->save_for_backward({x, bias_in.value_or(at::Tensor())});
    ctx->saved_data["is_tanh"] = is_tanh;
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("gelu");
    if (!grad_outputs[0].defined()) {
      return variable_list(3);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &bias = saved[1];
    const c10::cuda::CUDAGuard device(x.device());
    const auto shape = rows_of(x, bias, ctx->saved_data["is_tanh"].toBool());
    const auto grad = detail::dense(grad_outputs[0]);
    const auto dense_bias = bias.defined() ? detail::dense(bias) : at::Tensor();
    const auto target = detail::grad_target(bias, bias.defined() && ctx->needs_input_grad(1));
    const int parts = detail::num_column_parts(shape.rows, shape.columns);
    const auto sums = target.memory.defined()
                          ? at::empty({parts, shape.columns}, x.options().dtype(at::kFloat))
                          : at::Tensor();
    const auto grad_x = at::empty_like(x);
    const auto stream = detail::stream_of(x);
    C10_CUDA_CHECK(detail::launch_gelu_backward(
        shape, grad.const_data_ptr(), x.const_data_ptr(), detail::data_or_null(dense_bias),
        grad_x.mutable_data_ptr(), sums.defined() ? sums.mutable_data_ptr<float>() : nullptr,
        stream));
    if (sums.defined()) {
      C10_CUDA_CHECK(detail::launch_add_parts(sums.const_data_ptr<float>(), parts, shape.columns,
                                              detail::grad_out(target), stream));
    }
    return {grad_x, target.result(), at::Tensor()};
  }
};
#endif

}  // namespace

at::Tensor gelu(const at::Tensor& x, const GeluOptions& options) {
  const auto& bias = options.bias;
  if (bias.defined()) {
    TORCH_CHECK(x.dim() > 0 && bias.sizes() == at::IntArrayRef(x.size(-1)), "gelu: bias ",
                bias.sizes(), " does not fit ", x.sizes());
    detail::check_same_device("gelu", x, "bias", bias);
  }
#ifdef DDP_HAS_CUDA
  if (fits_gelu_kernels(x, bias)) {
    return Gelu::apply(x, detail::optional_of(bias), options.tanh);
  }
#endif
  return at::gelu(bias.defined() ? x + bias.to(x.scalar_type()) : x,
                  options.tanh ? "tanh" : "none");
}

}  // namespace ddp::ops
