// SPDX-License-Identifier: Apache-2.0
// Whether this process may have training state that a stop must save. Torch-free.
#pragma once

#include <cstdint>
#include <functional>

namespace ddp::detail {

/// The first step begins: a step was announced, a wrapped model ran in grad mode, or the program
/// asked for stop requests and so handles them itself. Any thread.
void record_training_state();
bool has_training_state();

/// Calls the hook, if any, with each announced step (>= 0), and with -1 after a forward of a
/// wrapped model in grad mode. The hook may throw; ddp::run sets it while no other thread runs.
void report_step(int64_t step);
void set_step_hook(std::function<void(int64_t step)> hook);

/// stop_requested() for the library's own phases, without noting that the program asked.
bool is_stop_requested();

}  // namespace ddp::detail
