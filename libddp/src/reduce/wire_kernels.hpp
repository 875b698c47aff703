// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddp::detail {

constexpr int kWireThreads = 256;
constexpr int kWireVectors = 4;  // of 16 bytes, each thread's

/// In vectors of 16 bytes. Where `num_live` is 9 it is one run.
struct WirePiece {
  int32_t bucket_begin, wire_begin;
  int32_t count;  ///< on the wire
  int32_t inner;  ///< of one tap of one filter
  int32_t num_live;
  uint64_t taps;  ///< the live ones, four bits each
};

/// What a block moves.
struct WireChunk {
  int32_t piece, first;
};

/// Bucket to wire, or back.
cudaError_t launch_move_live(const WirePiece* pieces, const WireChunk* chunks, int num_chunks,
                             void* bucket, void* wire, bool packs, cudaStream_t stream);

}  // namespace ddp::detail
