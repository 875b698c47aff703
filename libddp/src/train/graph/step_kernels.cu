// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "train/graph/step_kernels.hpp"

namespace ddp::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr uint64_t kVector = sizeof(uint4);
constexpr uint64_t kMaxBlocks = 1056;  // eight for each SM of an H200

__device__ void copy_region(const FeedCopy& copy) {
  const auto from = reinterpret_cast<uintptr_t>(copy.from);
  const auto to = reinterpret_cast<uintptr_t>(copy.to);
  const uint64_t thread = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  const uint64_t vectors = (from | to) % kVector == 0 ? copy.bytes / kVector : 0;
  const auto* source = static_cast<const uint4*>(copy.from);
  auto* target = static_cast<uint4*>(copy.to);
  uint64_t i = thread;
  for (; i + (kUnroll - 1) * stride < vectors; i += kUnroll * stride) {
    uint4 held[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      held[k] = source[i + k * stride];
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      target[i + k * stride] = held[k];
    }
  }
  for (; i < vectors; i += stride) {
    target[i] = source[i];
  }
  for (uint64_t b = vectors * kVector + thread; b < copy.bytes; b += stride) {
    static_cast<char*>(copy.to)[b] = static_cast<const char*>(copy.from)[b];
  }
}

__global__ void __launch_bounds__(kThreads) feed(const __grid_constant__ FeedArguments arguments) {
  if (blockIdx.x == 0) {
    if (threadIdx.x < arguments.num_numbers) {
      arguments.numbers_target[threadIdx.x] = arguments.numbers[threadIdx.x];
    }
    if (threadIdx.x == 0) {
      *arguments.sequence_target = arguments.sequence;
    }
  }
  for (int i = 0; i < arguments.num_copies; ++i) {
    copy_region(arguments.copies[i]);
  }
}

unsigned num_blocks(const FeedArguments& arguments) {
  uint64_t bytes = 0;
  for (int i = 0; i < arguments.num_copies; ++i) {
    bytes += arguments.copies[i].bytes;
  }
  const uint64_t per_block = kThreads * kVector * kUnroll;
  return static_cast<unsigned>(std::clamp<uint64_t>(bytes / per_block, 1, kMaxBlocks));
}

__device__ double read_number(const void* number, NumberType type) {
  switch (type) {
    case NumberType::Float:
      return *static_cast<const float*>(number);
    case NumberType::Double:
      return *static_cast<const double*>(number);
    case NumberType::Half:
      return __half2float(*static_cast<const __half*>(number));
    case NumberType::BFloat16:
      return __bfloat162float(*static_cast<const __nv_bfloat16*>(number));
    case NumberType::Int64:
      return static_cast<double>(*static_cast<const long long*>(number));
    case NumberType::Int32:
      return *static_cast<const int*>(number);
    case NumberType::Byte:
      return *static_cast<const unsigned char*>(number);
  }
  return 0;
}

__global__ void publish(const __grid_constant__ PublishArguments arguments) {
  const uint64_t sequence = *arguments.sequence;
  volatile PublishedSlot* slot = arguments.slots + sequence % arguments.num_slots;
  if (threadIdx.x < arguments.count) {
    slot->values[threadIdx.x] =
        read_number(arguments.numbers[threadIdx.x], arguments.types[threadIdx.x]);
  }
  // The host must see the numbers before the sequence number.
  __threadfence_system();
  __syncwarp();
  if (threadIdx.x == 0) {
    slot->sequence = sequence;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) fill(T* to, T value, uint64_t count) {
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    to[i] = value;
  }
}

template <typename T>
cudaError_t add_fill_of(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after, void* to,
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

cudaError_t launch_feed(const FeedArguments& arguments, cudaStream_t stream) {
  feed<<<num_blocks(arguments), kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

cudaError_t set_feed(cudaGraphExec_t graph, cudaGraphNode_t node, const FeedArguments& arguments) {
  void* values[] = {const_cast<FeedArguments*>(&arguments)};
  cudaKernelNodeParams parameters{};
  parameters.func = reinterpret_cast<void*>(feed);
  parameters.gridDim = dim3(num_blocks(arguments));
  parameters.blockDim = dim3(kThreads);
  parameters.kernelParams = values;
  return cudaGraphExecKernelNodeSetParams(graph, node, &parameters);
}

cudaError_t launch_publish(const PublishArguments& arguments, cudaStream_t stream) {
  publish<<<1, 32, 0, stream>>>(arguments);
  return cudaGetLastError();
}

cudaError_t add_fill(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after,
                     const cudaMemsetParams& memset, cudaGraphNode_t* node) {
  switch (memset.elementSize) {
    case 1:
      return add_fill_of<uint8_t>(graph, after, num_after, memset.dst, memset.value, memset.width,
                                  node);
    case 2:
      return add_fill_of<uint16_t>(graph, after, num_after, memset.dst, memset.value, memset.width,
                                   node);
    default:
      return add_fill_of<uint32_t>(graph, after, num_after, memset.dst, memset.value, memset.width,
                                   node);
  }
}

}  // namespace ddp::detail
