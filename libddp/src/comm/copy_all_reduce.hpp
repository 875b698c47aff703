// SPDX-License-Identifier: Apache-2.0
// All-reduces of large tensors on one node by the GPUs' copy engines, which leave the
// multiprocessors to the computation:
//
//   copies to the others' slots ── pushed ── sum of this rank's part ── copies to all ── complete
//
// Rank r sums the r-th part of the tensor. "pushed" and "complete" are waits for all ranks, made of
// writes and waits of the stream (cuStreamBatchMemOp), which need no multiprocessor either. Their
// values are constants, so an eager call of one rank meets a replayed graph of another.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "comm/copy_kernels.hpp"

namespace ddp::detail {

/// Memory that each rank has, at the addresses at which this rank reaches it.
using PeerAddresses = std::vector<char*>;  // by rank

class CopyAllReduce {
 public:
  static constexpr size_t kSlotsBytes = size_t{64} << 20;  ///< larger tensors take turns
  static constexpr size_t kAlignment = 16;                 ///< of all memory
  static size_t flags_bytes(int world_size);

  /// `slots` has kSlotsBytes on each rank, and `flags` flags_bytes(), which are zero before any
  /// rank's first run(). The memory outlives this.
  CopyAllReduce(int rank, PeerAddresses slots, PeerAddresses flags);

  /// Enqueues the sum, or the mean, of the tensors of `num_bytes` at `data`, this rank's part of
  /// it. Added in rank order in float32 and rounded once.
  void run(const PeerAddresses& data, size_t num_bytes, ops::detail::Element element, bool is_mean,
           cudaStream_t stream) const;

  /// Call after an abort: from now on nothing waits for other ranks, in eager calls and replays,
  /// and values are wrong, also those that other ranks receive. A thread sees to it until the
  /// process ends, so the flags must never be freed.
  void release() const noexcept;

 private:
  /// What one turn reduces of rank r's part: bytes [begin, end) of the tensor.
  struct Range {
    size_t begin = 0, end = 0;
    size_t size() const { return end - begin; }
  };
  enum class Meeting { Pushed, Complete };

  void meet(Meeting meeting, cudaStream_t stream) const;
  void reduce_ranges(const PeerAddresses& data, const std::vector<Range>& ranges,
                     ops::detail::Element element, float factor, cudaStream_t stream) const;
  int world_size() const { return static_cast<int>(slots_.size()); }
  size_t peer(int step) const { return static_cast<size_t>((rank_ + step) % world_size()); }

  const int rank_;
  int device_ = 0;
  const PeerAddresses slots_;
  const PeerAddresses flags_;
  const size_t slot_bytes_;
  void* const batch_mem_op_;
};

}  // namespace ddp::detail
