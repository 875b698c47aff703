// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/gemm.hpp"

#include <ATen/ATen.h>

#include "ddp/detail/model_weights.hpp"
#include "ops/tensor_launch.hpp"

#ifdef DDP_HAS_CUDA
#include "ops/gemm/cublaslt_gemm.hpp"
#endif

namespace ddp::ops::detail {
namespace {

void gemm_by_aten(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const GemmOptions& options) {
  const bool is_plain = options.alpha == 1 && options.beta == 0 && !options.bias.defined() &&
                        !options.addend.defined() && !options.a_scales.defined();
  if (is_plain && out.scalar_type() == a.scalar_type()) {
    at::Tensor target = out;
    at::mm_out(target, a, b);
    return;
  }
  const auto scaled = [](const at::Tensor& factor, const at::Tensor& scales, int64_t dim) {
    return scales.defined() ? factor.to(at::kFloat) * scales.unsqueeze(dim) : factor;
  };
  auto product = at::mm(scaled(a, options.a_scales, 1), scaled(b, options.b_scales, 0));
  if (options.alpha != 1) {
    product.mul_(options.alpha);
  }
  if (options.bias.defined()) {
    product.add_(options.bias);
  }
  if (options.addend.defined()) {
    product = product + options.addend;
  }
  if (options.beta == 0) {
    out.copy_(product);
  } else {
    out.add_(product);
  }
}

}  // namespace

void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
          const GemmOptions& options) {
  const at::NoGradGuard no_grad;
  check_same_device("gemm", a, "b", b);
  check_same_device("gemm", a, "out", out);
#ifdef DDP_HAS_CUDA
  const auto dtype = a.scalar_type();
  const bool fits =
      dtype == at::kBFloat16 || dtype == at::kHalf ||
      (runs_float32_products(a) && out.scalar_type() == at::kFloat) ||
      (dtype == at::kFloat8_e4m3fn && multiplies_fp8(a.device()) &&
       out.scalar_type() == at::kBFloat16 && a.size(1) % 16 == 0 && b.size(1) % 16 == 0);
  if (a.is_cuda() && fits && b.scalar_type() == dtype && out.numel() > 0 && a.numel() > 0) {
    return gemm_by_cublaslt(out, a, b, options);
  }
#endif
  gemm_by_aten(out, a, b, options);
}

void gemm_into(const GradTarget& target, const at::Tensor& a, const at::Tensor& b) {
  gemm_into(target.memory, target.beta, a, b);
}

void gemm_into(const at::Tensor& out, double beta, const at::Tensor& a, const at::Tensor& b,
               double alpha) {
  const bool fits = (out.scalar_type() == at::kFloat || out.scalar_type() == a.scalar_type()) &&
                    out.stride(1) == 1;
  if (fits) {
    return gemm(out, a, b, {.alpha = alpha, .beta = beta});
  }
  const auto product = at::empty(
      out.sizes(), a.options().dtype(a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  gemm(product, a, b, {.alpha = alpha});
  GradTarget{out, beta}.write(product);
}

}  // namespace ddp::ops::detail
