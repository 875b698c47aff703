// SPDX-License-Identifier: Apache-2.0
#include "comm/counter_kernels.hpp"

namespace ddp::detail {
namespace {

__global__ void counter_add(uint32_t* total, volatile uint32_t* shown, uint32_t by) {
  const uint32_t value = *total + by;
  *total = value;
  *shown = value;
}

__global__ void counter_set(volatile uint32_t* shown, uint32_t value) {
  *shown = value;
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

}  // namespace ddp::detail
