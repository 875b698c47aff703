// SPDX-License-Identifier: Apache-2.0
// Chooses the fastest of a library's algorithms by measuring once.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <string>

namespace ddp::ops::detail {

/// Returns the index of the fastest of `count` calls, or `count` if none runs. Uses ChoiceBook's
/// choice for `what` if that call runs. Otherwise measures and notes the choice, except for an
/// empty `what`. Returns the first call within a factor `same_time` of the fastest: the library's
/// order, not noise, decides among equals. `call` enqueues one call on the current stream (a
/// private one) and throws c10::Error if the call does not run. Each call is captured several times
/// and replayed: timing single launches of 3 us would measure the host. The host waits, first for
/// the caller's stream. Threads measure one after another.
size_t choose_fastest(const std::string& what, c10::Device device, size_t count,
                      const std::function<void(size_t)>& call, float same_time = 1.02F);

}  // namespace ddp::ops::detail
