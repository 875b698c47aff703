// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "ops/layout/layout.hpp"
#include "ops/layout/row_copy.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_transposed(const at::Tensor& x) {
  return x.stride(-1) != 1 && x.stride(-2) == 1;
}

// [batches, rows, columns] for at::bmm(), which takes transposed matrices as they are.
at::Tensor as_matrices(const at::Tensor& x) {
  const auto flat = [](const at::Tensor& rows) { return contiguous_copy(rows).flatten(0, -3); };
  return is_transposed(x) ? flat(x.transpose(-2, -1)).transpose(1, 2) : flat(x);
}

at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& b, double scale) {
  if (scale == 1) {
    return at::bmm(a, b);
  }
  const auto unused = at::empty({1}, a.options()).expand({a.size(0), a.size(1), b.size(2)});
  return at::baddbmm(unused, a, b, /*beta=*/0, /*alpha=*/scale);
}

// scale * a b, itself or, for a transposed result, as a transposed view of its transpose.
at::Tensor product_as(bool is_transposed, const at::Tensor& a, const at::Tensor& b, double scale) {
  return is_transposed ? scaled_product(b.transpose(1, 2), a.transpose(1, 2), scale).transpose(1, 2)
                       : scaled_product(a, b, scale);
}

class MatmulRows : public torch::autograd::Function<MatmulRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b,
                            double scale) {
    const auto left = as_matrices(a), right = as_matrices(b);
    ctx->save_for_backward({left, right});
    auto sizes = a.sizes().slice(0, a.dim() - 2).vec();
    ctx->saved_data["batches"] = sizes;
    ctx->saved_data["scale"] = scale;
    sizes.insert(sizes.end(), {a.size(-2), b.size(-1)});
    // Autograd lets nobody write a view that is a function's result.
    return at::_unsafe_view(scaled_product(left, right, scale), sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("matmul");
    const auto saved = ctx->get_saved_variables();
    const auto &left = saved[0], &right = saved[1];
    const auto batches = ctx->saved_data["batches"].toIntVector();
    const auto scale = ctx->saved_data["scale"].toDouble();
    const auto grad = as_matrices(grads[0]);
    variable_list results(3);
    if (ctx->needs_input_grad(0)) {
      results[0] =
          product_as(is_transposed(left), grad, right.transpose(1, 2), scale).unflatten(0, batches);
    }
    if (ctx->needs_input_grad(1)) {
      results[1] =
          product_as(is_transposed(right), left.transpose(1, 2), grad, scale).unflatten(0, batches);
    }
    return results;
  }
};

bool needs_copy(const at::Tensor& x) {
  return !x.is_contiguous() && !x.transpose(-2, -1).is_contiguous();
}

// Under autocast at::matmul() converts other dtypes.
bool fits(const at::Tensor& a, const at::Tensor& b) {
  const auto type = a.scalar_type();
  return runs_own_float_kernels(a) && compute_dtype(a, type) == type && b.device() == a.device() &&
         b.scalar_type() == type && a.dim() > 2 && b.dim() == a.dim() && a.numel() > 0 &&
         b.numel() > 0 && a.sizes().slice(0, a.dim() - 2) == b.sizes().slice(0, a.dim() - 2) &&
         a.size(-1) == b.size(-2);
}

}  // namespace

at::Tensor matmul_rows(const at::Tensor& a, const at::Tensor& b, double scale) {
  // A factor of 0 would hide what is not finite.
  const bool is_own = fits(a, b) && std::isnormal(scale);
  if (is_own && (scale != 1 || needs_copy(a) || needs_copy(b))) {
    return MatmulRows::apply(a, b, scale);
  }
  return at::matmul(scale == 1 ? a : a * scale, b);
}

}  // namespace ddp::ops::detail
