// SPDX-License-Identifier: Apache-2.0
// Streams for a single purpose. The pool (getStreamFromPool) cycles through 32 streams, so two
// purposes can share one. Work enqueued for one purpose then becomes part of the other's capture,
// or ends it. All library streams that may take part in a capture are private. Others (a loader's
// copies) may come from the pool.
#pragma once

#include <c10/core/Stream.h>

#include <map>
#include <mutex>
#include <utility>

namespace ddp::ops::detail {

/// For work concurrent with a step, for the step itself, for reductions.
enum class StreamPriority { Lowest, Middle, Highest };

/// A new exclusive stream of an accelerator that does not wait for the default stream. Never
/// destroyed: events and memory of the caching allocator refer to it. On a CPU: its only stream.
c10::Stream make_private_stream(c10::Device device,
                                StreamPriority priority = StreamPriority::Lowest);

/// Whether a CUDA graph captures `stream`.
bool is_captured(const c10::Stream& stream);

/// The T of `stream`, made at the first call and kept until the process ends. One T per stream
/// keeps threads with different streams independent: one of them may be capturing.
template <typename T>
T& per_stream(const c10::Stream& stream) {
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, T>;
  const std::lock_guard lock(mutex);
  return all->try_emplace({stream.device_index(), stream.id()}, stream).first->second;
}

}  // namespace ddp::ops::detail
