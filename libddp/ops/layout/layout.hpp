// SPDX-License-Identifier: Apache-2.0
// Operators that move values, as LibTorch's compute them, with copies by rows (row_copy.hpp)
// forward and backward. Gradients have the strides of the values that they belong to, so that the
// operators before, which permute these, find them contiguous. Without rows, LibTorch's operators
// run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ddp::ops::detail {

/// at::reshape(): a view where one is possible.
at::Tensor reshape_rows(const at::Tensor& x, at::IntArrayRef shape);

/// x.contiguous()
at::Tensor contiguous_rows(const at::Tensor& x);

/// at::roll() along `dims`.
at::Tensor roll_rows(const at::Tensor& x, at::IntArrayRef shifts, at::IntArrayRef dims);

/// x[0] … x[count - 1] along `dim`, which may have more. Autograd does not see that they are views
/// of x, so nobody may write them.
std::vector<at::Tensor> select_rows(const at::Tensor& x, int64_t dim, int64_t count);

/// scale * at::matmul(a, b). On CUDA the product is scaled before it is rounded, and of permuted
/// heads [batch, heads, length, width] only rows are copied.
at::Tensor matmul_rows(const at::Tensor& a, const at::Tensor& b, double scale);

}  // namespace ddp::ops::detail
