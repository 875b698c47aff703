// SPDX-License-Identifier: Apache-2.0
#include "reduce/wire_kernels.hpp"

namespace ddp::detail {
namespace {

__device__ __forceinline__ int place_in_bucket(const WirePiece& piece, int i) {
  if (piece.num_live == 9) {
    return piece.bucket_begin + i;
  }
  const int row = i / piece.inner;
  const int filter = row / piece.num_live;
  const int tap = static_cast<int>(piece.taps >> (4 * (row - filter * piece.num_live))) & 15;
  return piece.bucket_begin + (filter * 9 + tap) * piece.inner + (i - row * piece.inner);
}

// All reads of a thread are under way before its first write.
template <bool Packs>
__global__ void __launch_bounds__(kWireThreads)
    move_live(const WirePiece* pieces, const WireChunk* chunks, uint4* bucket, uint4* wire) {
  const WireChunk chunk = chunks[blockIdx.x];
  const WirePiece piece = pieces[chunk.piece];
  uint4 values[kWireVectors];
  int places[kWireVectors];
#pragma unroll
  for (int v = 0; v < kWireVectors; ++v) {
    const int i = chunk.first + v * kWireThreads + static_cast<int>(threadIdx.x);
    if (i < piece.count) {
      places[v] = place_in_bucket(piece, i);
      values[v] = Packs ? bucket[places[v]] : wire[piece.wire_begin + i];
    }
  }
#pragma unroll
  for (int v = 0; v < kWireVectors; ++v) {
    const int i = chunk.first + v * kWireThreads + static_cast<int>(threadIdx.x);
    if (i < piece.count) {
      (Packs ? wire[piece.wire_begin + i] : bucket[places[v]]) = values[v];
    }
  }
}

}  // namespace

cudaError_t launch_move_live(const WirePiece* pieces, const WireChunk* chunks, int num_chunks,
                             void* bucket, void* wire, bool packs, cudaStream_t stream) {
  auto* const in_bucket = static_cast<uint4*>(bucket);
  auto* const on_wire = static_cast<uint4*>(wire);
  if (packs) {
    move_live<true><<<num_chunks, kWireThreads, 0, stream>>>(pieces, chunks, in_bucket, on_wire);
  } else {
    move_live<false><<<num_chunks, kWireThreads, 0, stream>>>(pieces, chunks, in_bucket, on_wire);
  }
  return cudaGetLastError();
}

}  // namespace ddp::detail
