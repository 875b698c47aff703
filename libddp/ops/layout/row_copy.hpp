// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ddp::ops::detail {

/// to.copy_(from) outside of autograd, for tensors of the same sizes and dtype. On CUDA rows whose
/// values lie side by side in both are copied as vectors, which LibTorch's strided copy does not
/// do. No two elements of `to` may share memory.
void copy_rows(const at::Tensor& to, const at::Tensor& from);

/// Whether a copy of `x` to contiguous memory would be made of rows: LibTorch's kernels are as fast
/// for all other tensors.
bool has_rows(const at::Tensor& x);

/// A contiguous copy by copy_rows(), or `x` itself if it is contiguous.
at::Tensor contiguous_copy(const at::Tensor& x);

/// x's strides if its memory has no gaps and no overlaps, else those of a contiguous tensor.
std::vector<int64_t> dense_strides(const at::Tensor& x);

}  // namespace ddp::ops::detail
