// SPDX-License-Identifier: Apache-2.0
// Orders work on two streams of a device; does nothing on a CPU, which has one stream.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddp::ops::detail {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Later work on `waiting` runs after the current work on `other`; the host does not wait.
inline void wait_for(const c10::Stream& other, const c10::Stream& waiting) {
  if (other != waiting) {
    c10::Event event(other.device_type());
    event.record(other);
    event.block(waiting);
  }
}

}  // namespace ddp::ops::detail
