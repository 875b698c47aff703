// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/gemm.hpp"

#include <ATen/ATen.h>

#include "ops/tensor_launch.hpp"

#ifdef DDP_HAS_CUDA
#include "ops/gemm/cublaslt_gemm.hpp"
#endif

namespace ddp::ops::detail {
namespace {

void gemm_by_aten(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const GemmOptions& options) {
  const bool is_plain = options.beta == 0 && !options.bias.defined() && !options.addend.defined();
  if (is_plain && out.scalar_type() == a.scalar_type()) {
    at::Tensor target = out;
    at::mm_out(target, a, b);
    return;
  }
  auto product = at::mm(a, b);
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
  if (a.is_cuda() && (a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf) &&
      b.scalar_type() == a.scalar_type() && out.numel() > 0 && a.numel() > 0) {
    return gemm_by_cublaslt(out, a, b, options);
  }
#endif
  gemm_by_aten(out, a, b, options);
}

void gemm_into(const GradTarget& target, const at::Tensor& a, const at::Tensor& b) {
  gemm_into(target.memory, target.beta, a, b);
}

void gemm_into(const at::Tensor& out, double beta, const at::Tensor& a, const at::Tensor& b) {
  const bool fits = (out.scalar_type() == at::kFloat || out.scalar_type() == a.scalar_type()) &&
                    out.stride(1) == 1;
  if (fits) {
    return gemm(out, a, b, {.beta = beta});
  }
  const auto product = at::empty(
      out.sizes(), a.options().dtype(a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  gemm(product, a, b);
  GradTarget{out, beta}.write(product);
}

}  // namespace ddp::ops::detail
