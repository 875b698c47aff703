// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/language/dropout_draws.hpp"

namespace ddp::ops::detail {

/// The state of a call's draws in one thread.
struct DropoutState {
  uint2 key;
  uint64_t counter;
  uint32_t threshold;
  float scale;
};

/// Call once per thread, with is_first in one thread of the grid.
__device__ __forceinline__ DropoutState start_draws(const DropoutDraws& draws, bool is_first) {
  const uint64_t seed =
      draws.device_seed != nullptr ? static_cast<uint64_t>(*draws.device_seed) : draws.seed;
  const uint64_t offset =
      draws.offset +
      (draws.device_offset != nullptr ? static_cast<uint64_t>(*draws.device_offset) : 0);
  if (is_first && draws.drawn != nullptr) {
    draws.drawn[0] = static_cast<int64_t>(seed);
    draws.drawn[1] = static_cast<int64_t>(offset);
  }
  return {.key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
          .counter = offset / 4,
          .threshold = draws.threshold,
          .scale = draws.scale};
}

/// The Philox4x32 generator with seven rounds, the fewest that pass every test of its authors
/// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2). Drawing is
/// what bounds kernels that drop for several layers; cuRAND's function makes ten.
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
  constexpr int kRounds = 7;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t first = uint64_t{0xD2511F53U} * counter.x;
    const uint64_t second = uint64_t{0xCD9E8D57U} * counter.z;
    counter = {
        static_cast<uint32_t>(second >> 32U) ^ counter.y ^ key.x, static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32U) ^ counter.w ^ key.y, static_cast<uint32_t>(first)};
    key.x += 0x9E3779B9U;
    key.y += 0xBB67AE85U;
  }
  return counter;
}

/// Which of eight elements are kept: their 16 bits, two to a word, and what these are compared
/// with.
struct Drawn8 {
  uint32_t words[4];
  uint32_t threshold;  // in the upper half

  __device__ __forceinline__ bool keeps_first(int word) const {
    return words[word] << 16U >= threshold;
  }
  __device__ __forceinline__ bool keeps_second(int word) const { return words[word] >= threshold; }
};

/// Draws for the eight elements number `vector` of the call.
__device__ __forceinline__ Drawn8 draw8(const DropoutState& state, int64_t vector) {
  const uint4 drawn =
      philox({static_cast<uint32_t>(state.counter), static_cast<uint32_t>(state.counter >> 32U),
              static_cast<uint32_t>(vector), static_cast<uint32_t>(vector >> 32U)},
             state.key);
  return {{drawn.x, drawn.y, drawn.z, drawn.w}, state.threshold << 16U};
}

/// Zeroes and scales the eight elements number `vector` of the call.
__device__ __forceinline__ void drop8(const DropoutState& state, int64_t vector,
                                      float (&values)[8]) {
  const Drawn8 drawn = draw8(state, vector);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    values[2 * j] = drawn.keeps_first(j) ? values[2 * j] * state.scale : 0.0F;
    values[2 * j + 1] = drawn.keeps_second(j) ? values[2 * j + 1] * state.scale : 0.0F;
  }
}

/// Zeroes the eight 2-byte elements number `vector` of the call without scaling the others.
__device__ __forceinline__ uint4 masked8(const DropoutState& state, int64_t vector,
                                         const uint4& values) {
  const Drawn8 drawn = draw8(state, vector);
  uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    words[j] &= drawn.keeps_first(j) ? 0xFFFFFFFFU : 0xFFFF0000U;
    words[j] &= drawn.keeps_second(j) ? 0xFFFFFFFFU : 0x0000FFFFU;
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace ddp::ops::detail
