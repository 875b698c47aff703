// SPDX-License-Identifier: Apache-2.0
// Spans of the Chrome/Perfetto trace and of NVTX. Cost when not recording: one relaxed atomic load.
#pragma once

#include <cstdint>

namespace ddp {

class TraceRecorder;

/// A span that may begin and end in different functions and threads. `name` and `track` must
/// outlive it (string literals do).
class TraceSpan {
 public:
  enum class Clock {
    HostAndDevice,  ///< also the kernels launched in the span, as track "… (device)"
    Host,
  };

  /// Does nothing when not recording. An open span continues.
  void begin(const char* name, const char* track, Clock clock = Clock::HostAndDevice) noexcept;
  /// Does nothing if the span is not open.
  void end() noexcept;

 private:
  const char* name_ = nullptr;
  const char* track_ = nullptr;
  TraceRecorder* recorder_ = nullptr;
  int64_t begin_ns_ = 0;
  uint64_t begin_mark_ = 0;
  uint64_t range_ = 0;
};

/// Span of a C++ scope.
class TraceScope {
 public:
  TraceScope(const char* name, const char* track,
             TraceSpan::Clock clock = TraceSpan::Clock::HostAndDevice);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceSpan span_;
};

}  // namespace ddp
