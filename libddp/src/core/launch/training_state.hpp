// SPDX-License-Identifier: Apache-2.0
// Whether this process may have training state that a stop must save. Torch-free.
#pragma once

namespace ddp::detail {

/// The first step begins: a step was announced, a wrapped model ran in grad mode, or the program
/// asked for stop requests and so handles them itself. Any thread.
void note_training_state();
bool has_training_state();

/// stop_requested() for the library's own phases, without noting that the program asked.
bool is_stop_requested();

}  // namespace ddp::detail
