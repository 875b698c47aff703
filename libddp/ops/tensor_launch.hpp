// SPDX-License-Identifier: Apache-2.0
// Checks that ops make before they use kernels, and the arguments of kernels from tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#ifdef DDP_HAS_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/kernel_types.hpp"
#endif

namespace ddp::ops::detail {

/// Whether the library's kernels are compiled for `tensor`'s device.
inline bool runs_own_code(const at::Tensor& tensor) {
#ifdef DDP_HAS_CUDA
  return tensor.is_cuda() && at::cuda::getDeviceProperties(tensor.device().index())->major >= 8;
#else
  return static_cast<void>(tensor), false;
#endif
}

/// Whether the library's kernels support `dtype` on `tensor`'s device.
inline bool runs_own_kernels(const at::Tensor& tensor, at::ScalarType dtype) {
  return (dtype == at::kBFloat16 || dtype == at::kHalf) && runs_own_code(tensor);
}

/// The same for its own dtype, of kernels that also have float32.
inline bool runs_own_float_kernels(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return (dtype == at::kFloat && runs_own_code(tensor)) || runs_own_kernels(tensor, dtype);
}

/// Whether a product with `tensor` is a strict float32 product of the library's gemm().
inline bool runs_float32_products(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && runs_own_code(tensor) &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) !=
             at::Float32Precision::TF32;
}

/// Autocast's dtype if enabled for the tensor's device, else `otherwise`.
inline at::ScalarType compute_dtype(const at::Tensor& tensor, at::ScalarType otherwise) {
  const auto device = tensor.device().type();
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device)
                                                   : otherwise;
}

/// Raises if `tensor`, called `name` in `op`, is on another device than the op's input `x`: kernels
/// would use its pointer on x's device.
inline void check_same_device(const char* op, const at::Tensor& x, const char* name,
                              const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device() == x.device(), op, ": ", name, " is on ", tensor.device(),
              ", its input on ", x.device(), "; move both to one device");
}

/// Call first in a backward whose results carry no graph. With create_graph, gradients through them
/// would be silently lost.
inline void check_differentiated_once(const char* op) {
  TORCH_CHECK(
      !c10::GradMode::is_enabled(), op,
      ": its gradient cannot be differentiated again (create_graph=true); use PyTorch's ops "
      "where a second derivative is needed (ResNet: fused_ops=false; exported model: fuse=false)");
}

/// `tensor`'s memory as a tensor that autograd does not take for a view. It has tensor's version,
/// so that a backward refuses memory that was changed through either.
inline at::Tensor alias_of(const at::Tensor& tensor, at::IntArrayRef sizes) {
  auto alias = at::empty({0}, tensor.options());
  alias.set_(tensor.storage(), tensor.storage_offset(), sizes, tensor.strides());
  if (!alias.is_inference() && !tensor.is_inference()) {  // these have no version
    alias.unsafeGetTensorImpl()->set_version_counter(
        tensor.unsafeGetTensorImpl()->version_counter());
  }
  return alias;
}
inline at::Tensor alias_of(const at::Tensor& tensor) {
  return alias_of(tensor, tensor.sizes());
}

/// Whether kernels may read `tensor` 16 bytes at a time. A view of a flat buffer may be unaligned.
inline bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

inline at::Tensor aligned(const at::Tensor& tensor) {
  return is_aligned(tensor) ? tensor : tensor.clone();
}

/// `tensor` itself if kernels may read it as one array, else a copy.
inline at::Tensor dense(const at::Tensor& tensor) {
  return aligned(tensor.contiguous());
}

/// For a kernel's optional argument.
inline const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

#ifdef DDP_HAS_CUDA
inline Element element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Element::Float32;
    case at::kBFloat16:
      return Element::Bfloat16;
    case at::kHalf:
      return Element::Float16;
    case at::kByte:
      return Element::UInt8;
    default:
      TORCH_CHECK(false, "no kernel for tensors of ", dtype);
  }
}

inline cudaStream_t stream_of(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index());
}
#endif

}  // namespace ddp::ops::detail
