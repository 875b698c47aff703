// SPDX-License-Identifier: Apache-2.0
#include "ops/vision/stem_packing.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "ops/tensor_launch.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#ifdef DDP_HAS_CUDA
#include <ATen/cuda/CUDAContext.h>

#include "ops/vision/stem_kernels.hpp"
#include "ops/vision/tap_packing.hpp"
#endif

namespace ddp::ops {
namespace detail {
namespace {

constexpr int64_t kPad = 3;

#ifdef DDP_HAS_CUDA
/// The kernels support all dtypes except float64.
bool kernels_pack(const at::Tensor& from, at::ScalarType dtype) {
  return runs_own_kernels(from, dtype) && from.scalar_type() != at::kDouble;
}

StemImage view_of(const at::Tensor& image, bool halves = true) {
  const auto output = [&](int64_t size) {
    return static_cast<int>(halves ? stem_output(size) : size);
  };
  StemImage view{.data = image.const_data_ptr(),
                 .element = element_of(image.scalar_type()),
                 .batch = static_cast<int>(image.size(0)),
                 .height = static_cast<int>(image.size(2)),
                 .width = static_cast<int>(image.size(3)),
                 .strides = {},
                 .rows = output(image.size(2)),
                 .columns = output(image.size(3))};
  std::copy_n(image.strides().begin(), 4, view.strides);
  return view;
}

StemFilter view_of_filter(const at::Tensor& filter) {
  StemFilter view{.data = filter.mutable_data_ptr(),
                  .element = element_of(filter.scalar_type()),
                  .filters = static_cast<int>(filter.size(0)),
                  .strides = {}};
  std::copy_n(filter.strides().begin(), 4, view.strides);
  return view;
}

at::Tensor pack(const at::Tensor& filter, StemPacking packing, at::Tensor packed) {
  const c10::cuda::CUDAGuard device(filter.device());
  C10_CUDA_CHECK(launch_stem_pack_filter(view_of_filter(filter), packing, packed.mutable_data_ptr(),
                                         element_of(packed.scalar_type()), stream_of(filter)));
  return packed;
}

bool unpack(const at::Tensor& packed, StemPacking packing, const at::Tensor& target, double beta) {
  if (!runs_own_code(packed) || packed.scalar_type() == at::kDouble ||
      target.scalar_type() == at::kDouble) {
    return false;
  }
  const c10::cuda::CUDAGuard device(packed.device());
  C10_CUDA_CHECK(launch_stem_unpack_filter(view_of_filter(target), packing, packed.const_data_ptr(),
                                           element_of(packed.scalar_type()), beta != 0,
                                           stream_of(packed)));
  return true;
}
#endif

void write_by_aten(const at::Tensor& filter, const at::Tensor& target, double beta) {
  if (beta == 0) {
    target.copy_(filter);
  } else {
    target.add_(filter);
  }
}

at::Tensor to_depth_by_aten(const at::Tensor& image, at::ScalarType dtype) {
  const int64_t rows = stem_output(image.size(2)) + kPad;
  const int64_t columns = stem_output(image.size(3)) + kPad;
  const auto padded = at::constant_pad_nd(
      image.to(dtype),
      {kPad, 2 * columns - image.size(3) - kPad, kPad, 2 * rows - image.size(2) - kPad});
  const auto cells =
      padded.contiguous().view({image.size(0), 3, rows, 2, columns, 2}).permute({0, 3, 5, 1, 2, 4});
  return at::constant_pad_nd(cells, {0, 0, 0, 0, 0, 1})
      .reshape({image.size(0), 16, rows, columns})
      .contiguous(at::MemoryFormat::ChannelsLast);
}

}  // namespace

at::Tensor stem_patches(const at::Tensor& image, at::ScalarType dtype) {
  const int64_t batch = image.size(0);
  const int64_t pixels = stem_output(image.size(2)) * stem_output(image.size(3));
#ifdef DDP_HAS_CUDA
  if (kernels_pack(image, dtype)) {
    const c10::cuda::CUDAGuard device(image.device());
    auto patches = at::empty({batch * pixels, kStemPatchColumns}, image.options().dtype(dtype));
    C10_CUDA_CHECK(launch_stem_patches(view_of(image), patches.mutable_data_ptr(),
                                       element_of(dtype), stream_of(image)));
    return patches;
  }
#endif
  const auto columns = at::im2col(image.to(dtype), {7, 7}, {1, 1}, {kPad, kPad}, {2, 2});
  const auto rows =
      columns.view({batch, 3, 49, pixels}).permute({0, 3, 2, 1}).reshape({batch * pixels, 147});
  return at::constant_pad_nd(rows, {0, 5});
}

bool stem_patches_fit_image(const at::Tensor& image) {
#ifdef DDP_HAS_CUDA
  return stem_patches_fit(image.size(2), image.size(3));
#else
  return static_cast<void>(image), true;
#endif
}

at::Tensor stem_filter_to_depth(const at::Tensor& filter, at::ScalarType dtype) {
  const int64_t filters = filter.size(0);
#ifdef DDP_HAS_CUDA
  if (kernels_pack(filter, dtype)) {
    return pack(filter, StemPacking::SpaceToDepth,
                at::empty({filters, 16, 4, 4}, filter.options().dtype(dtype),
                          at::MemoryFormat::ChannelsLast));
  }
#endif
  const auto square = at::constant_pad_nd(filter.to(dtype), {0, 1, 0, 1}).contiguous();
  const auto cells = square.view({filters, 3, 4, 2, 4, 2}).permute({0, 3, 5, 1, 2, 4});
  return at::constant_pad_nd(cells, {0, 0, 0, 0, 0, 1})
      .reshape({filters, 16, 4, 4})
      .contiguous(at::MemoryFormat::ChannelsLast);
}

at::Tensor stem_filter_rows(const at::Tensor& filter, at::ScalarType dtype) {
#ifdef DDP_HAS_CUDA
  if (kernels_pack(filter, dtype)) {
    return pack(filter, StemPacking::Im2col,
                at::empty({filter.size(0), kStemPatchColumns}, filter.options().dtype(dtype)));
  }
#endif
  const auto rows = filter.to(dtype).permute({0, 2, 3, 1}).reshape({filter.size(0), 147});
  return at::constant_pad_nd(rows, {0, 5});
}

void write_filter_from_depth(const at::Tensor& packed, const at::Tensor& target, double beta) {
#ifdef DDP_HAS_CUDA
  if (unpack(packed.contiguous(at::MemoryFormat::ChannelsLast), StemPacking::SpaceToDepth, target,
             beta)) {
    return;
  }
#endif
  const auto cells = packed.contiguous().view({packed.size(0), 2, 2, 4, 4, 4}).narrow(3, 0, 3);
  const auto square = cells.permute({0, 3, 4, 1, 5, 2}).reshape({packed.size(0), 3, 8, 8});
  write_by_aten(square.narrow(2, 0, 7).narrow(3, 0, 7), target, beta);
}

void write_filter_from_rows(const at::Tensor& packed, const at::Tensor& target, double beta) {
#ifdef DDP_HAS_CUDA
  if (unpack(packed.contiguous(), StemPacking::Im2col, target, beta)) {
    return;
  }
#endif
  const auto taps = packed.narrow(1, 0, 147).view({packed.size(0), 7, 7, 3});
  write_by_aten(taps.permute({0, 3, 1, 2}), target, beta);
}

#ifdef DDP_HAS_CUDA
namespace {

StemProducts products_of(const at::Tensor& image, const StemFilter& filter, at::ScalarType dtype,
                         int64_t size) {
  return {view_of(image, /*halves=*/size == 7), filter, element_of(dtype), static_cast<int>(size)};
}

}  // namespace

bool supports_stem_product(const at::Tensor& image, const at::Tensor& filter,
                           at::ScalarType dtype) {
  if (!kernels_pack(image, dtype) || filter.scalar_type() == at::kDouble ||
      filter.device() != image.device() || image.numel() == 0) {
    return false;
  }
  const c10::cuda::CUDAGuard device(image.device());
  return products_of(image, view_of_filter(filter), dtype, filter.size(2)).fits();
}

at::Tensor stem_product(const at::Tensor& image, const at::Tensor& filter, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard device(image.device());
  const auto call = products_of(image, view_of_filter(filter), dtype, filter.size(2));
  auto output = at::empty({image.size(0), filter.size(0), call.image.rows, call.image.columns},
                          image.options().dtype(dtype), at::MemoryFormat::ChannelsLast);
  C10_CUDA_CHECK(launch_stem_forward(call, output.mutable_data_ptr(),
                                     at::cuda::getCurrentDeviceProperties()->multiProcessorCount,
                                     stream_of(image)));
  return output;
}

void write_stem_gradient(const at::Tensor& image, const at::Tensor& grad_in,
                         const GradTarget& target) {
  const c10::cuda::CUDAGuard device(image.device());
  const auto grad = is_aligned(grad_in) ? grad_in : grad_in.clone();
  const auto call = products_of(image, {}, grad.scalar_type(), target.memory.size(2));
  const int splits =
      stem_gradient_splits(call, at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
  const auto partial =
      at::empty({splits, target.memory.numel()}, image.options().dtype(at::kFloat));
  C10_CUDA_CHECK(launch_stem_gradient(call, grad.const_data_ptr(), splits,
                                      partial.mutable_data_ptr<float>(), stream_of(image)));
  C10_CUDA_CHECK(launch_sum_parts(partial.const_data_ptr<float>(), splits, call.size,
                                  filter_view(target.memory), target.beta != 0, stream_of(image)));
}
#else
bool supports_stem_product(const at::Tensor&, const at::Tensor&, at::ScalarType) {
  return false;
}

at::Tensor stem_product(const at::Tensor&, const at::Tensor&, at::ScalarType) {
  TORCH_CHECK(false, "stem_product: built without CUDA");
}

void write_stem_gradient(const at::Tensor&, const at::Tensor&, const GradTarget&) {
  TORCH_CHECK(false, "write_stem_gradient: built without CUDA");
}
#endif

}  // namespace detail

at::Tensor stem_space_to_depth(const at::Tensor& image, at::ScalarType dtype) {
  TORCH_CHECK(image.dim() == 4 && image.size(1) == 3,
              "stem_space_to_depth: an image [batch, 3, height, width] is needed, not ",
              image.sizes());
  TORCH_CHECK(!at::GradMode::is_enabled() || !image.requires_grad(),
              "stem_space_to_depth: the image requires a gradient, which this op cannot compute; "
              "pass the image to stem_convolution() instead, or detach it");
  const at::NoGradGuard no_grad;
#ifdef DDP_HAS_CUDA
  if (detail::kernels_pack(image, dtype)) {
    const c10::cuda::CUDAGuard device(image.device());
    const auto view = detail::view_of(image);
    auto cells = at::empty({view.batch, 16, view.rows + 3, view.columns + 3},
                           image.options().dtype(dtype), at::MemoryFormat::ChannelsLast);
    C10_CUDA_CHECK(detail::launch_stem_space_to_depth(
        view, cells.mutable_data_ptr(), detail::element_of(dtype), detail::stream_of(image)));
    return cells;
  }
#endif
  return detail::to_depth_by_aten(image, dtype);
}

}  // namespace ddp::ops
