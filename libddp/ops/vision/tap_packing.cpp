// SPDX-License-Identifier: Apache-2.0
#include "ops/vision/tap_packing.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "ops/grad_target.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops::detail {
namespace {

#ifdef DDP_HAS_CUDA
bool kernels_support(const at::Tensor& filter) {
  // Eight adjacent channels are read at once. In a slice of a filter some taps may be unaligned.
  const auto stride_fits = [&](int64_t dim) {
    return filter.stride(dim) * filter.element_size() % 16 == 0;
  };
  return runs_own_code(filter) && filter.scalar_type() != at::kDouble && filter.size(1) % 8 == 0 &&
         is_aligned(filter) &&
         (filter.stride(1) != 1 || (stride_fits(0) && stride_fits(2) && stride_fits(3)));
}
#endif

}  // namespace

#ifdef DDP_HAS_CUDA
TapFilter filter_view(const at::Tensor& filter) {
  TapFilter view{.data = const_cast<void*>(filter.const_data_ptr()),
                 .element = element_of(filter.scalar_type()),
                 .filters = static_cast<int>(filter.size(0)),
                 .channels = static_cast<int>(filter.size(1)),
                 .strides = {}};
  std::copy_n(filter.strides().begin(), 4, view.strides);
  return view;
}
#endif

at::Tensor spread_taps(const at::Tensor& filter, const TapBlocks& blocks, at::ScalarType dtype) {
  const int64_t filters = filter.size(0), channels = filter.size(1);
  const auto memory = filter.options().dtype(dtype);
#ifdef DDP_HAS_CUDA
  if (runs_own_kernels(filter, dtype) && kernels_support(filter)) {
    const c10::cuda::CUDAGuard device(filter.device());
    const auto dense = at::empty({blocks.outs * filters, blocks.ins * channels}, memory);
    C10_CUDA_CHECK(launch_spread_taps(filter_view(filter), blocks, dense.mutable_data_ptr(),
                                      element_of(dtype), stream_of(filter)));
    return dense;
  }
#endif
  const auto dense = at::zeros({blocks.outs, filters, blocks.ins, channels}, memory);
  for (int out = 0; out < blocks.outs; ++out) {
    for (int in = 0; in < blocks.ins; ++in) {
      if (const int tap = blocks.taps[out * blocks.ins + in]; tap >= 0) {
        dense.select(0, out).select(1, in).copy_(filter.select(3, tap % 3).select(2, tap / 3));
      }
    }
  }
  return dense.view({blocks.outs * filters, blocks.ins * channels});
}

void fold_taps(const at::Tensor& dense, const TapBlocks& blocks, const at::Tensor& target,
               double beta) {
  const int64_t filters = target.size(0), channels = target.size(1);
#ifdef DDP_HAS_CUDA
  if (dense.is_contiguous() && dense.scalar_type() != at::kDouble && kernels_support(target)) {
    const c10::cuda::CUDAGuard device(target.device());
    C10_CUDA_CHECK(launch_fold_taps(filter_view(target), blocks, dense.const_data_ptr(),
                                    element_of(dense.scalar_type()), beta != 0, stream_of(dense)));
    return;
  }
#endif
  const auto view = dense.view({blocks.outs, filters, blocks.ins, channels});
  const auto sums = at::zeros(target.sizes(), dense.options());
  for (int out = 0; out < blocks.outs; ++out) {
    for (int in = 0; in < blocks.ins; ++in) {
      if (const int tap = blocks.taps[out * blocks.ins + in]; tap >= 0) {
        sums.select(3, tap % 3).select(2, tap / 3).add_(view.select(0, out).select(1, in));
      }
    }
  }
  GradTarget{target, beta}.write(sums);
}

}  // namespace ddp::ops::detail
