// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/tensor_hash_kernels.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;
using Sum = unsigned long long;  // atomicAdd has no overload for uint64_t

/// The sum over the block's threads, in thread 0.
__device__ Sum sum_over_block(Sum value) {
  __shared__ Sum sums[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffU, value, distance);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  Sum sum = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    sum += sums[warp];
  }
  return sum;
}

__device__ int tensor_of(const HashedTensors& tensors, int chunk) {
  int low = 0;
  int high = tensors.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tensors.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads)
    hash_chunks(const __grid_constant__ HashedTensors tensors, Sum* hashes) {
  const auto chunk = static_cast<int>(blockIdx.x);
  const int tensor = tensor_of(tensors, chunk);
  const uint8_t* bytes = tensors.bytes[tensor];
  const int64_t num_bytes = tensors.num_bytes[tensor];
  const int64_t num_words = (num_bytes + 7) / 8;
  const int64_t begin = (chunk - tensors.first_chunk[tensor]) * kHashChunkWords;
  const int64_t end = min(begin + kHashChunkWords, num_words);
  Sum sum = 0;
  int64_t slow = begin;  // words from here on are read byte by byte
  if (reinterpret_cast<uintptr_t>(bytes) % 16 == 0) {
    const auto* pairs = reinterpret_cast<const ulonglong2*>(bytes);
    const int64_t end_pair = min(end, num_bytes / 8) / 2;
#pragma unroll 4
    for (int64_t i = begin / 2 + threadIdx.x; i < end_pair; i += kThreads) {
      const ulonglong2 pair = pairs[i];
      sum += hash_word(pair.x, 2 * i) + hash_word(pair.y, 2 * i + 1);
    }
    slow = max(begin, 2 * end_pair);
  }
  for (int64_t i = slow + threadIdx.x; i < end; i += kThreads) {
    sum += hash_word(read_word(bytes, num_bytes, i), i);
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) {
    atomicAdd(hashes + tensor, sum);
  }
}

}  // namespace

cudaError_t launch_hash(const HashedTensors& tensors, int64_t* hashes, cudaStream_t stream) {
  const int num_chunks = tensors.first_chunk[tensors.count];
  if (num_chunks == 0) {
    return cudaSuccess;
  }
  hash_chunks<<<num_chunks, kThreads, 0, stream>>>(tensors, reinterpret_cast<Sum*>(hashes));
  return cudaGetLastError();
}

}  // namespace ddp::ops::detail
