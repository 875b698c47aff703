// SPDX-License-Identifier: Apache-2.0
#include "ops/language/gated_activation.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "ddp/ops/language.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/elementwise_kernels.hpp"
#include "ops/language/fp8_kernels.hpp"
#endif

namespace ddp::ops {
namespace detail {
namespace {

std::vector<int64_t> half_sizes(const at::Tensor& gate_up) {
  auto sizes = gate_up.sizes().vec();
  sizes.back() /= 2;
  return sizes;
}

#ifdef DDP_HAS_CUDA
bool fits_kernels(const at::Tensor& gate_up) {
  return runs_own_kernels(gate_up, gate_up.scalar_type()) && gate_up.numel() > 0 &&
         gate_up.size(-1) % 16 == 0;
}
#endif

}  // namespace

at::Tensor swiglu_forward(const at::Tensor& gate_up) {
  const auto sizes = half_sizes(gate_up);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(gate_up)) {
    const c10::cuda::CUDAGuard device(gate_up.device());
    const auto in = dense(gate_up);
    const auto out = at::empty(sizes, in.options());
    C10_CUDA_CHECK(launch_swiglu(in.const_data_ptr(), element_of(in.scalar_type()),
                                 out.numel() / sizes.back(), sizes.back(), out.mutable_data_ptr(),
                                 stream_of(in)));
    return out;
  }
#endif
  return at::silu(gate_up.narrow(-1, 0, sizes.back()))
      .mul_(gate_up.narrow(-1, sizes.back(), sizes.back()));
}

at::Tensor swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up) {
  const int64_t width = grad.size(-1);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(gate_up)) {
    const c10::cuda::CUDAGuard device(gate_up.device());
    const auto in = dense(gate_up), dense_grad = dense(grad);
    const auto out = at::empty(in.sizes(), in.options());
    C10_CUDA_CHECK(launch_swiglu_backward(dense_grad.const_data_ptr(), in.const_data_ptr(),
                                          element_of(in.scalar_type()), grad.numel() / width, width,
                                          out.mutable_data_ptr(), stream_of(in)));
    return out;
  }
#endif
  const AutocastOff no_autocast(gate_up.device().type());
  const auto gate = gate_up.narrow(-1, 0, width), up = gate_up.narrow(-1, width, width);
  return at::cat({at::silu_backward(grad * up, gate), at::silu(gate).mul_(grad)}, -1);
}

SwigluGradient swiglu_backward_fp8(const at::Tensor& grad, const at::Tensor& gate_up) {
#ifdef DDP_HAS_CUDA
  if (fits_kernels(gate_up) && grad.size(1) <= kMaxGatedColumns) {
    const c10::cuda::CUDAGuard device(gate_up.device());
    const auto in = dense(gate_up), dense_grad = dense(grad);
    const auto out = at::empty(in.sizes(), in.options());
    const auto values = at::empty(in.sizes(), in.options().dtype(at::kFloat8_e4m3fn));
    const auto scales = at::empty({in.size(0)}, in.options().dtype(at::kFloat));
    C10_CUDA_CHECK(launch_swiglu_backward_fp8(
        dense_grad.const_data_ptr(), in.const_data_ptr(), element_of(in.scalar_type()),
        grad.size(0), grad.size(1), out.mutable_data_ptr(), values.mutable_data_ptr(),
        scales.mutable_data_ptr<float>(), stream_of(in)));
    return {out, {values, scales}};
  }
#endif
  const auto rows = swiglu_backward(grad, gate_up);
  return {rows, quantize_rows(rows)};
}

}  // namespace detail

namespace {

// Composed by autograd, the op would also save silu(gate), a third of an MLP's memory.
class Swiglu : public torch::autograd::Function<Swiglu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate_up) {
    ctx->save_for_backward({gate_up});
    ctx->set_materialize_grads(false);
    return detail::swiglu_forward(gate_up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("swiglu");
    if (!grad_outputs[0].defined()) {
      return {at::Tensor()};
    }
    return {detail::swiglu_backward(grad_outputs[0], ctx->get_saved_variables()[0])};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0, "swiglu: the last dimension of ",
              gate_up.sizes(), " does not hold gate and up, two equal halves");
  return Swiglu::apply(gate_up);
}

}  // namespace ddp::ops
