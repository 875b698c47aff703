// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <curand_philox4x32_x.h>

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

/// Zeroes and scales the eight elements number `vector` of the call.
__device__ __forceinline__ void drop8(const DropoutState& state, int64_t vector,
                                      float (&values)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint64_t counter = state.counter + half;
    const uint4 drawn =
        curand_Philox4x32_10({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                              static_cast<uint32_t>(vector), static_cast<uint32_t>(vector >> 32)},
                             state.key);
    const uint32_t numbers[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& value = values[4 * half + j];
      value = numbers[j] < state.threshold ? 0.0F : value * state.scale;
    }
  }
}

}  // namespace ddp::ops::detail
