// SPDX-License-Identifier: Apache-2.0
// The order of work on two streams of a device; on a CPU, whose only stream is in order, nothing.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddp::ops::detail {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// What is enqueued on `waiting` from here on follows what is on `other` now; the host does not
/// wait.
inline void wait_for(const c10::Stream& other, const c10::Stream& waiting) {
  if (other != waiting) {
    c10::Event event(other.device_type());
    event.record(other);
    event.block(waiting);
  }
}

}  // namespace ddp::ops::detail
