// SPDX-License-Identifier: Apache-2.0
// Which of a library's algorithms a call takes: the one that is fastest here, measured once.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <string>

namespace ddp::ops::detail {

/// Whether the current stream is being captured: nothing can be measured then.
bool is_capturing();

/// The index of the fastest of `count` calls, by ChoiceBook where `what` is known there (and that
/// call runs), else by measurement, which is noted there; an empty `what` is not. Of those within
/// `same_time` of it, a factor, the first: the library's own order is to decide there, not noise.
/// `call` enqueues one on the current stream (a private one here) and throws c10::Error where it
/// does not run. Each is captured several times over and replayed: launched one by one, calls of 3
/// us would be timed by the host's pace. The host waits, first for what the caller's stream holds.
/// `count` where none runs. Threads measure one after another.
size_t choose_fastest(const std::string& what, c10::Device device, size_t count,
                      const std::function<void(size_t)>& call, float same_time = 1.02F);

}  // namespace ddp::ops::detail
