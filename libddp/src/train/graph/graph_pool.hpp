// SPDX-License-Identifier: Apache-2.0
// Device memory of captured steps and of the eager steps before them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace ddp {

/// An allocator memory pool for captures.
class GraphPool {
 public:
  using Id = std::pair<unsigned long long, unsigned long long>;
  /// Returns the pool that graphs hold, else a new pool. The allocators refuse a released pool,
  /// even if tensors or their own bookkeeping keep it.
  std::shared_ptr<const Id> id();

 private:
  std::weak_ptr<const Id> id_;
};

namespace detail {

/// Measures peak tensor memory from here on, beyond the tensors alive at the start or at the end
/// (state made by a step stays). Resets the allocator's peak statistics.
class PeakBytes {
 public:
  explicit PeakBytes(at::Device device);
  int64_t bytes() const;

 private:
  const at::Device device_;
  const int64_t before_;
};

/// Returns how many of `bytes` do not fit into the unused memory of the current stream's segments
/// in a pool ({0, 0}: the pool of eager steps). 0 if the device has less free memory.
int64_t missing_bytes(at::Device device, GraphPool::Id pool, int64_t bytes);
/// Reserves a block in the allocator's cache for the current stream, if the device has the memory.
/// Without it, a tensor gets its own block from the device, which fits no larger tensor. Tensors of
/// a backward grow, so a step would keep a fifth more than its peak memory.
void reserve_block(int64_t bytes, at::Device device);

}  // namespace detail
}  // namespace ddp
