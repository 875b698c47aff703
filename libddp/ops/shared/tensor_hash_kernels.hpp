// SPDX-License-Identifier: Apache-2.0
// The hash of memory, for host and device. Torch-free.
#pragma once

#include <cstdint>

#ifdef DDP_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#ifdef __CUDACC__
#define DDP_HASH_INLINE __host__ __device__ __forceinline__
#else
#define DDP_HASH_INLINE inline
#endif

namespace ddp::ops::detail {

/// The share of 64-bit word `index` in its tensor's hash, which is the sum over all words modulo
/// 2^64. For each index it is a bijection of words (splitmix64).
DDP_HASH_INLINE uint64_t hash_word(uint64_t word, uint64_t index) {
  uint64_t mixed = word ^ ((index + 1) * 0x9E3779B97F4A7C15ULL);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
  return mixed ^ (mixed >> 31);
}

/// Word `index` of memory, little-endian. Bytes behind the end are 0.
DDP_HASH_INLINE uint64_t read_word(const uint8_t* bytes, int64_t num_bytes, int64_t index) {
  uint64_t word = 0;
  for (int64_t i = 0; i < 8 && index * 8 + i < num_bytes; ++i) {
    word |= static_cast<uint64_t>(bytes[index * 8 + i]) << (8 * i);
  }
  return word;
}

inline constexpr int64_t kHashChunkWords = 8192;  ///< of one block
inline constexpr int kMaxHashedTensors = 128;     ///< of one launch, whose arguments have 4 KiB

struct HashedTensors {
  const uint8_t* bytes[kMaxHashedTensors];
  int64_t num_bytes[kMaxHashedTensors];
  int32_t first_chunk[kMaxHashedTensors + 1];  ///< [count + 1]
  int count = 0;
};

#ifdef DDP_HAS_CUDA
/// Adds the hashes to `hashes` [count]. Capturable.
cudaError_t launch_hash(const HashedTensors& tensors, int64_t* hashes, cudaStream_t stream);
#endif

}  // namespace ddp::ops::detail
