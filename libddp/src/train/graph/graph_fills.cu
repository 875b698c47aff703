// SPDX-License-Identifier: Apache-2.0
#include "train/graph/graph_fills.hpp"

namespace ddp::detail {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) fill(T* to, T value, uint64_t count) {
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    to[i] = value;
  }
}

template <typename T>
cudaError_t add(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after, void* to,
                unsigned value, uint64_t count, cudaGraphNode_t* node) {
  auto* target = static_cast<T*>(to);
  auto element = static_cast<T>(value);
  void* arguments[] = {&target, &element, &count};
  cudaKernelNodeParams parameters{};
  parameters.func = reinterpret_cast<void*>(fill<T>);
  parameters.gridDim = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  parameters.blockDim = dim3(kThreads);
  parameters.kernelParams = arguments;
  return cudaGraphAddKernelNode(node, graph, after, num_after, &parameters);
}

}  // namespace

cudaError_t add_fill(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after,
                     const cudaMemsetParams& memset, cudaGraphNode_t* node) {
  switch (memset.elementSize) {
    case 1:
      return add<uint8_t>(graph, after, num_after, memset.dst, memset.value, memset.width, node);
    case 2:
      return add<uint16_t>(graph, after, num_after, memset.dst, memset.value, memset.width, node);
    default:
      return add<uint32_t>(graph, after, num_after, memset.dst, memset.value, memset.width, node);
  }
}

}  // namespace ddp::detail
