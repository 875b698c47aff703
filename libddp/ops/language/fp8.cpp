// SPDX-License-Identifier: Apache-2.0
#include "ops/language/fp8.hpp"

#include <ATen/ATen.h>

#include "ddp/detail/model_weights.hpp"
#include "ops/language/fp8_format.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/fp8_kernels.hpp"
#endif

namespace ddp::ops {
namespace detail {
namespace {

constexpr double kLargest = kFp8Max;

QuantizedRows quantize_by_aten(const at::Tensor& matrix) {
  const auto x = matrix.to(at::kFloat);
  const auto largest = x.abs().amax(1, /*keepdim=*/true);
  const auto inverse = at::where(largest > kTinyFp8Row, kLargest / largest, 1);
  const auto scales = at::where(largest <= kTinyFp8Row, 1, largest / kLargest);
  return {(x * inverse).to(at::kFloat8_e4m3fn), scales.squeeze(1).to(at::kFloat)};
}

}  // namespace

QuantizedRows quantize_rows(const at::Tensor& matrix) {
#ifdef DDP_HAS_CUDA
  if (runs_own_kernels(matrix, matrix.scalar_type()) && matrix.size(1) % 8 == 0 &&
      matrix.size(1) <= kMaxQuantizedColumns && matrix.numel() > 0) {
    const c10::cuda::CUDAGuard device(matrix.device());
    const auto in = dense(matrix);
    const auto values = at::empty(in.sizes(), in.options().dtype(at::kFloat8_e4m3fn));
    const auto scales = at::empty({in.size(0)}, in.options().dtype(at::kFloat));
    C10_CUDA_CHECK(launch_quantize_rows(in.const_data_ptr(), element_of(in.scalar_type()),
                                        in.size(0), in.size(1), values.mutable_data_ptr(),
                                        scales.mutable_data_ptr<float>(), stream_of(in)));
    return {values, scales};
  }
#endif
  return quantize_by_aten(matrix);
}

}  // namespace detail

bool multiplies_fp8(at::Device device) {
#ifdef DDP_HAS_CUDA
  return device.is_cuda() && at::cuda::getDeviceProperties(device.index())->major == 9;
#else
  return static_cast<void>(device), false;
#endif
}

Fp8Weight quantize_weight(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const auto rows = detail::quantize_rows(weight.detach());
  const auto columns = detail::quantize_rows(weight.detach().t().contiguous());
  return {rows.values, rows.scales, columns.values, columns.scales};
}

}  // namespace ddp::ops
