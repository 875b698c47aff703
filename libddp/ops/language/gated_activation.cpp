// SPDX-License-Identifier: Apache-2.0
#include "ops/language/gated_activation.hpp"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "ddp/ops/decoder.hpp"
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
bool fits_kernels(const at::Tensor& tensor, int64_t width) {
  return runs_own_kernels(tensor, tensor.scalar_type()) && tensor.numel() > 0 && width % 8 == 0;
}

/// Whether the kernels can read [..., width] as rows: of one tensor, or parts of longer ones.
bool is_in_rows(const at::Tensor& tensor) {
  const int64_t width = tensor.size(-1), rows = tensor.numel() / width;
  const auto strides =
      at::detail::computeStride(tensor.sizes(), tensor.strides(), at::IntArrayRef({rows, width}));
  return strides && (*strides)[1] == 1 && (*strides)[0] % 8 == 0 && is_aligned(tensor);
}

/// Of tensors for which is_in_rows().
GatedRows gated_rows(const at::Tensor& gate, const at::Tensor& up) {
  const int64_t width = gate.size(-1);
  return {.rows = gate.numel() / width,
          .width = width,
          .element = element_of(gate.scalar_type()),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr(),
          .gate_stride = gate.view({-1, width}).stride(0),
          .up_stride = up.view({-1, width}).stride(0)};
}

/// Of dense rows of two halves [..., 2 width].
GatedRows gated_rows(const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(-1) / 2;
  const auto* const gate = static_cast<const char*>(gate_up.const_data_ptr());
  return {.rows = gate_up.numel() / (2 * width),
          .width = width,
          .element = element_of(gate_up.scalar_type()),
          .gate = gate,
          .up = gate + width * gate_up.element_size(),
          .gate_stride = 2 * width,
          .up_stride = 2 * width};
}

class SeparateSwiglu : public torch::autograd::Function<SeparateSwiglu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate,
                            const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    ctx->set_materialize_grads(false);
    const c10::cuda::CUDAGuard device(gate.device());
    const auto out = at::empty(gate.sizes(), gate.options());
    C10_CUDA_CHECK(launch_swiglu(gated_rows(gate, up), out.mutable_data_ptr(), stream_of(out)));
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    check_differentiated_once("swiglu");
    const auto& grad = grad_outputs[0];
    if (!grad.defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const auto saved = ctx->get_saved_variables();
    const c10::cuda::CUDAGuard device(grad.device());
    const auto dense_grad = dense(grad);
    const auto grad_gate = at::empty(grad.sizes(), grad.options());
    const auto grad_up = at::empty(grad.sizes(), grad.options());
    C10_CUDA_CHECK(launch_swiglu_backward(
        gated_rows(saved[0], saved[1]), dense_grad.const_data_ptr(), grad_gate.mutable_data_ptr(),
        grad_up.mutable_data_ptr(), grad.size(-1), stream_of(grad)));
    return {grad_gate, grad_up};
  }
};
#endif

}  // namespace

at::Tensor swiglu_forward(const at::Tensor& gate_up) {
  const auto sizes = half_sizes(gate_up);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(gate_up, sizes.back())) {
    const c10::cuda::CUDAGuard device(gate_up.device());
    const auto in = dense(gate_up);
    const auto out = at::empty(sizes, in.options());
    C10_CUDA_CHECK(launch_swiglu(gated_rows(in), out.mutable_data_ptr(), stream_of(in)));
    return out;
  }
#endif
  return at::silu(gate_up.narrow(-1, 0, sizes.back()))
      .mul_(gate_up.narrow(-1, sizes.back(), sizes.back()));
}

at::Tensor swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up) {
  const int64_t width = grad.size(-1);
#ifdef DDP_HAS_CUDA
  if (fits_kernels(gate_up, width)) {
    const c10::cuda::CUDAGuard device(gate_up.device());
    const auto in = dense(gate_up), dense_grad = dense(grad);
    const auto out = at::empty(in.sizes(), in.options());
    auto* const grad_gate = static_cast<char*>(out.mutable_data_ptr());
    C10_CUDA_CHECK(launch_swiglu_backward(gated_rows(in), dense_grad.const_data_ptr(), grad_gate,
                                          grad_gate + width * out.element_size(), 2 * width,
                                          stream_of(in)));
    return out;
  }
#endif
  const AutocastOff no_autocast(gate_up.device().type());
  const auto gate = gate_up.narrow(-1, 0, width), up = gate_up.narrow(-1, width, width);
  return at::cat({at::silu_backward(grad * up, gate), at::silu(gate).mul_(grad)}, -1);
}

SwigluGradient swiglu_backward_fp8(const at::Tensor& grad, const at::Tensor& gate_up) {
#ifdef DDP_HAS_CUDA
  if (fits_kernels(gate_up, grad.size(1)) && grad.size(1) <= kMaxGatedColumns) {
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

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.dim() > 0 && gate.sizes() == up.sizes(), "swiglu: gate ", gate.sizes(),
              " and up ", up.sizes(), " are not of one shape [..., width]");
  detail::check_same_device("swiglu", gate, "up", up);
#ifdef DDP_HAS_CUDA
  if (gate.scalar_type() == up.scalar_type() && detail::fits_kernels(gate, gate.size(-1)) &&
      detail::is_in_rows(gate) && detail::is_in_rows(up)) {
    return detail::SeparateSwiglu::apply(gate, up);
  }
#endif
  return at::silu(gate) * up;
}

}  // namespace ddp::ops
