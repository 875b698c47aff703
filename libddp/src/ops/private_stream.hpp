// SPDX-License-Identifier: Apache-2.0
// Streams that belong to one purpose. The pool's (getStreamFromPool) are handed out in turn: after
// 32 of them two purposes share one, and whatever one enqueues while the other is being captured
// becomes a part of that graph, or ends the capture. Every stream of ours that may take part in a
// capture is of this kind; what never does (a loader's copies) may come from the pool.
#pragma once

#include <c10/core/Stream.h>

#include <map>
#include <mutex>
#include <utility>

namespace ddp::ops::detail {

/// Of work beside a step, of the step itself, of reductions.
enum class StreamPriority { Lowest, Middle, Highest };

/// A new stream of an accelerator that nobody else gets, not waiting for the default stream. Never
/// destroyed: events and memory of the caching allocator refer to it. On a CPU its only stream.
c10::Stream make_private_stream(c10::Device device,
                                StreamPriority priority = StreamPriority::Lowest);

/// The T that goes with `stream`, made from it at the first call and kept until the process ends.
/// What works beside a stream is kept per stream, so that two threads, each on its own, never meet:
/// one of them may be capturing.
template <typename T>
T& beside(const c10::Stream& stream) {
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, T>;
  const std::lock_guard lock(mutex);
  return all->try_emplace({stream.device_index(), stream.id()}, stream).first->second;
}

}  // namespace ddp::ops::detail
