// SPDX-License-Identifier: Apache-2.0
#include "ops/layout/row_copy.hpp"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/layout/row_copy_kernels.hpp"
#endif

namespace ddp::ops::detail {
namespace {

constexpr int64_t kMinRowBytes = 16;

/// A dimension of two tensors, with strides in elements.
struct Dim {
  int64_t size, to_stride, from_stride;
};

// Dimensions by the strides of `to`, the innermost first. Those that are one in both are joined.
std::vector<Dim> joined_dims(at::IntArrayRef sizes, at::IntArrayRef to_strides,
                             at::IntArrayRef from_strides) {
  std::vector<Dim> dims;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1) {
      dims.push_back({sizes[i], to_strides[i], from_strides[i]});
    }
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return a.to_stride < b.to_stride; });
  std::vector<Dim> joined;
  for (const Dim& dim : dims) {
    if (!joined.empty() && dim.to_stride == joined.back().size * joined.back().to_stride &&
        dim.from_stride == joined.back().size * joined.back().from_stride) {
      joined.back().size *= dim.size;
    } else {
      joined.push_back(dim);
    }
  }
  return joined;
}

bool are_rows(const std::vector<Dim>& dims, int64_t element_bytes) {
  return dims.size() > 1 && dims[0].to_stride == 1 && dims[0].from_stride == 1 &&
         dims[0].size * element_bytes >= kMinRowBytes;
}

#ifdef DDP_HAS_CUDA
// The largest vector of which both addresses and all strides are multiples; 0: there is none.
int64_t vector_bytes(const std::vector<Dim>& dims, int64_t element_bytes, const void* to,
                     const void* from) {
  uint64_t bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                  static_cast<uint64_t>(dims[0].size * element_bytes);
  for (size_t i = 1; i < dims.size(); ++i) {
    bits |= static_cast<uint64_t>(dims[i].to_stride * element_bytes) |
            static_cast<uint64_t>(dims[i].from_stride * element_bytes);
  }
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 0;
}

std::optional<RowCopy> plan_copy(const at::Tensor& to, const at::Tensor& from) {
  const auto element_bytes = static_cast<int64_t>(to.element_size());
  const auto dims = joined_dims(to.sizes(), to.strides(), from.strides());
  if (!are_rows(dims, element_bytes) || dims.size() > kMaxRowDims) {
    return std::nullopt;
  }
  const int64_t bytes =
      vector_bytes(dims, element_bytes, to.const_data_ptr(), from.const_data_ptr());
  if (bytes == 0 || to.numel() * element_bytes / bytes > kMaxRowVectors) {
    return std::nullopt;
  }
  RowCopy copy = {.dims = static_cast<int>(dims.size()), .vector_bytes = static_cast<int>(bytes)};
  copy.vectors = to.numel() * element_bytes / bytes;
  for (size_t i = 0; i < dims.size(); ++i) {
    const bool is_row = i == 0;
    copy.sizes[i] =
        static_cast<uint32_t>(is_row ? dims[i].size * element_bytes / bytes : dims[i].size);
    copy.to_strides[i] = is_row ? 1 : dims[i].to_stride * element_bytes / bytes;
    copy.from_strides[i] = is_row ? 1 : dims[i].from_stride * element_bytes / bytes;
  }
  return copy;
}

bool may_launch(const at::Tensor& to, const at::Tensor& from) {
  return runs_own_code(to) && to.device() == from.device() && to.sizes() == from.sizes() &&
         to.scalar_type() == from.scalar_type() && to.numel() > 0 && !to.is_conj() &&
         !from.is_conj() && !to.is_neg() && !from.is_neg();
}
#endif

}  // namespace

void copy_rows(const at::Tensor& to, const at::Tensor& from) {
#ifdef DDP_HAS_CUDA
  if (may_launch(to, from)) {
    if (const auto copy = plan_copy(to, from)) {
      const c10::cuda::CUDAGuard guard(to.device());
      C10_CUDA_CHECK(
          launch_row_copy(*copy, to.mutable_data_ptr(), from.const_data_ptr(), stream_of(to)));
      return;
    }
  }
#endif
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

bool has_rows(const at::Tensor& x) {
  if (!runs_own_code(x) || x.is_contiguous() || x.numel() == 0) {
    return false;
  }
  const auto contiguous = c10::contiguous_strides(x.sizes());
  return are_rows(joined_dims(x.sizes(), contiguous, x.strides()),
                  static_cast<int64_t>(x.element_size()));
}

at::Tensor contiguous_copy(const at::Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  const auto copy = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  copy_rows(copy, x);
  return copy;
}

std::vector<int64_t> dense_strides(const at::Tensor& x) {
  const auto contiguous = c10::contiguous_strides(x.sizes());
  return (x.is_non_overlapping_and_dense() ? x.strides() : at::IntArrayRef(contiguous)).vec();
}

}  // namespace ddp::ops::detail
