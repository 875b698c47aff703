// SPDX-License-Identifier: Apache-2.0
// Read-only passes over gradients, and moving averages.
#include "optim/flat_kernels.hpp"
#include "optim/flat_memory.cuh"
#include "optim/flat_sums.cuh"

namespace ddp::detail {
namespace {

// One block per chunk.
__global__ void __launch_bounds__(kFlatThreads)
    flat_scan(const __grid_constant__ FlatScan scan,
              const __grid_constant__ FlatGradients gradients) {
  const int index = gradients.first_chunk + static_cast<int>(blockIdx.x);
  const FlatChunk chunk = scan.chunks[index];
  const int local = chunk.segment - gradients.first_segment;
  const void* const data = gradients.data[local];
  const int64_t numel = data == nullptr ? 0 : scan.segments[chunk.segment].numel;
  const float inverse_scale = scan.inverse_scale.get();
  const int64_t begin = static_cast<int64_t>(chunk.index) * kFlatChunk + threadIdx.x * 4;
  float4 gradient[kFlatVectors];
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const int64_t i = begin + v * kFlatThreads * 4;
    gradient[v] = {};
    if (i < numel) {
      gradient[v] = read_gradient(data, gradients.dtype[local],
                                  gradients.aligned[local] && i + 4 <= numel, i, numel);
    }
  }
  double sum = 0.0;
  bool finite = true;
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float value = (&gradient[v].x)[k];
      finite = finite && flat_is_finite(value);
      const double scaled = value * inverse_scale;
      sum += scaled * scaled;
    }
  }
  sum = sum_over_block(sum);
  const bool all_finite = __syncthreads_and(finite ? 1 : 0) != 0;
  if (threadIdx.x == 0) {
    scan.sums[index] = sum;
    scan.bad[index] = all_finite ? 0 : 1;
  }
}

// One block.
__global__ void __launch_bounds__(kFlatThreads)
    flat_scan_end(const __grid_constant__ FlatScan scan) {
  double square = 0.0;
  int first_bad = scan.num_chunks;
  for (int c = static_cast<int>(threadIdx.x); c < scan.num_chunks; c += kFlatThreads) {
    square += scan.sums[c];
    if (scan.bad[c] != 0 && c < first_bad) {
      first_bad = c;
    }
  }
  square = sum_over_block(square);
  __shared__ int first;
  if (threadIdx.x == 0) {
    first = scan.num_chunks;
  }
  __syncthreads();
  atomicMin(&first, first_bad);  // integers: the same in every order
  __syncthreads();
  if (threadIdx.x == 0) {
    flat_conclude(scan, square, first < scan.num_chunks ? scan.chunks[first].segment : -1);
  }
}

// One block per chunk.
__global__ void __launch_bounds__(kFlatThreads)
    flat_average(const FlatAverage* averages, const FlatChunk* chunks, float share) {
  const FlatChunk chunk = chunks[blockIdx.x];
  const FlatAverage entry = averages[chunk.segment];
  const int64_t begin = static_cast<int64_t>(chunk.index) * kFlatChunk + threadIdx.x * 4;
  float4 average[kFlatVectors];
  float4 weight[kFlatVectors];
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const int64_t i = begin + v * kFlatThreads * 4;
    if (i < entry.numel) {
      const bool whole = entry.aligned && i + 4 <= entry.numel;
      average[v] = read_float4(entry.average, whole, i, entry.numel);
      weight[v] = read_gradient(entry.weight, entry.dtype, whole, i, entry.numel);
    }
  }
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const int64_t i = begin + v * kFlatThreads * 4;
    if (i < entry.numel) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& value = (&average[v].x)[k];
        value = flat_lerp(value, (&weight[v].x)[k], share);
      }
      write_float4(entry.average, entry.aligned && i + 4 <= entry.numel, i, entry.numel,
                   average[v]);
    }
  }
}

}  // namespace

cudaError_t launch_flat_scan(const FlatScan& scan, const FlatGradients& gradients,
                             cudaStream_t stream) {
  flat_scan<<<gradients.num_chunks, kFlatThreads, 0, stream>>>(scan, gradients);
  return cudaGetLastError();
}

cudaError_t launch_flat_scan_end(const FlatScan& scan, cudaStream_t stream) {
  flat_scan_end<<<1, kFlatThreads, 0, stream>>>(scan);
  return cudaGetLastError();
}

cudaError_t launch_flat_average(const FlatAverage* averages, const FlatChunk* chunks,
                                int num_chunks, float share, cudaStream_t stream) {
  flat_average<<<num_chunks, kFlatThreads, 0, stream>>>(averages, chunks, share);
  return cudaGetLastError();
}

}  // namespace ddp::detail
