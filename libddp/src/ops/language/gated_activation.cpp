// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/elementwise_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

#ifdef DDP_HAS_CUDA
bool fits_kernels(const at::Tensor& gate, const at::Tensor& up) {
  return !at::GradMode::is_enabled() &&  // enabled in a backward: create_graph=true
         detail::runs_own_kernels(gate, gate.scalar_type()) && gate.numel() > 0 &&
         gate.numel() % 8 == 0 && up.scalar_type() == gate.scalar_type();
}

at::Tensor swiglu_by_kernel(const at::Tensor& gate_in, const at::Tensor& up_in) {
  const c10::cuda::CUDAGuard device(gate_in.device());
  const auto gate = detail::dense(gate_in), up = detail::dense(up_in);
  const auto out = at::empty_like(gate);
  C10_CUDA_CHECK(detail::launch_swiglu(gate.const_data_ptr(), up.const_data_ptr(),
                                       detail::element_of(gate.scalar_type()), gate.numel(),
                                       out.mutable_data_ptr(), detail::stream_of(gate)));
  return out;
}

torch::autograd::variable_list swiglu_backward_by_kernel(const at::Tensor& grad_in,
                                                         const at::Tensor& gate_in,
                                                         const at::Tensor& up_in) {
  const c10::cuda::CUDAGuard device(gate_in.device());
  const auto grad = detail::dense(grad_in), gate = detail::dense(gate_in),
             up = detail::dense(up_in);
  const auto grad_gate = at::empty_like(gate), grad_up = at::empty_like(up);
  C10_CUDA_CHECK(detail::launch_swiglu_backward(
      grad.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(),
      detail::element_of(gate.scalar_type()), gate.numel(), grad_gate.mutable_data_ptr(),
      grad_up.mutable_data_ptr(), detail::stream_of(gate)));
  return {grad_gate, grad_up};
}
#endif

// Composed by autograd, the op would also save silu(gate), a third of an MLP's memory.
class Swiglu : public torch::autograd::Function<Swiglu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate,
                            const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
#ifdef DDP_HAS_CUDA
    if (fits_kernels(gate, up)) {
      return swiglu_by_kernel(gate, up);
    }
#endif
    return at::silu(gate).mul_(up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1], &grad = grad_outputs[0];
#ifdef DDP_HAS_CUDA
    if (fits_kernels(gate, up)) {
      return swiglu_backward_by_kernel(grad, gate, up);
    }
#endif
    const AutocastOff no_autocast(gate.device().type());
    return {at::silu_backward(grad * up, gate), at::silu(gate).mul_(grad)};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "swiglu: gate ", gate.sizes(), " and up ", up.sizes(),
              " differ");
  detail::check_same_device("swiglu", gate, "up", up);
  return Swiglu::apply(gate, up);
}

}  // namespace ddp::ops
