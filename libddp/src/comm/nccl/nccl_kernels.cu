// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_kernels.hpp"

#include <cuda_bf16.h>

#include <algorithm>

namespace ddp::detail {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

__global__ void counter_add(uint32_t* total, volatile uint32_t* shown, uint32_t by) {
  const uint32_t value = *total + by;
  *total = value;
  *shown = value;
}

__global__ void counter_set(volatile uint32_t* shown, uint32_t value) {
  *shown = value;
}

struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(__nv_bfloat16);
  __nv_bfloat16 values[kCount];
};

__device__ __nv_bfloat16 scaled(__nv_bfloat16 value, float factor) {
  return __float2bfloat16(__bfloat162float(value) * factor);
}

// Whole vectors first, then single elements; without `in_vectors` only single elements.
__global__ void scale(__nv_bfloat16* data, int64_t count, bool in_vectors, const float* given) {
#if __CUDA_ARCH__ >= 900  // see may_begin_early
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const float factor = *given;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_vectors = in_vectors ? count / Vector::kCount : 0;
  auto* vectors = reinterpret_cast<Vector*>(data);
  for (int64_t i = first; i < num_vectors; i += stride) {
    auto vector = vectors[i];
    for (auto& value : vector.values) {
      value = scaled(value, factor);
    }
    vectors[i] = vector;
  }
  for (int64_t i = num_vectors * Vector::kCount + first; i < count; i += stride) {
    data[i] = scaled(data[i], factor);
  }
}

// Only code for compute capability 9 waits for the previous kernel on the device.
bool may_begin_early() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, scale) == cudaSuccess && attributes.ptxVersion >= 90;
}

}  // namespace

cudaError_t launch_counter_add(uint32_t* total, uint32_t* shown, uint32_t by, cudaStream_t stream) {
  counter_add<<<1, 1, 0, stream>>>(total, shown, by);
  return cudaGetLastError();
}

cudaError_t launch_counter_set(uint32_t* shown, uint32_t value, cudaStream_t stream) {
  counter_set<<<1, 1, 0, stream>>>(shown, value);
  return cudaGetLastError();
}

cudaError_t launch_scale(void* data, int64_t count, const float* factor, cudaStream_t stream) {
  const bool in_vectors = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int64_t items = in_vectors ? count / Vector::kCount + 1 : count;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(
      static_cast<unsigned>(std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  static const bool begins_early = may_begin_early();
  config.numAttrs = begins_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, scale, static_cast<__nv_bfloat16*>(data), count, in_vectors,
                            factor);
}

}  // namespace ddp::detail
