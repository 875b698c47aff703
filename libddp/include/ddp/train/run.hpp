// SPDX-License-Identifier: Apache-2.0
// A program's main in one call: settings, context, signals, exit codes.
#pragma once

#include <functional>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/train/config.hpp"

namespace ddp {

using RunFunction = std::function<void(Context& context, const Config& config)>;  ///< training

/// Reads the settings, joins the job, calls `function` and returns the exit code for main.
///
/// - `--help [TOPIC]`, `--version` and `--completion SHELL` print text and return 0. Wrong settings
///   return 64 before using a GPU. At the start rank 0 logs the settings that differ from their
///   defaults, with `--show-settings` all. With `--summary` it logs the parameters of each model
///   that is wrapped with cfg.ddp.
/// - If a setting differs between ranks (folders may), all ranks return 70 and name it.
/// - SIGTERM, SIGUSR1 and the first Ctrl-C request a stop, on which the ranks agree in
///   Checkpointer::save_if_due. A program without a Checkpointer asks all ranks itself, every few
///   steps: `if (ctx.control_plane().agree_any(ddp::stop_requested())) { throw ddp::Stop("…"); }`.
///   Save your state first: `ddp::Stop` ends the job in order with code 75, "saved, requeue". A
///   second Ctrl-C exits at once.
///   Before the first step there is nothing to save: a stop then ends all ranks with 75 in a few
///   seconds. A step is announced by Metrics, Checkpointer::restore or Context::set_progress, or
///   begins with a wrapped model's forward. A program that called stop_requested() handles stops.
/// - SIGUSR2 makes rank 0 report what all ranks do and wait for (docs/recipes/hang.md).
/// - SIGPIPE is ignored, unless the program handles it: output that nobody reads is lost.
/// - An exception from `function` is published to all ranks. Every rank returns the code of the
///   first cause: Error::exit_code(), 1 for other exceptions. Rank 0 shows the cause's message and
///   rank. A rank that has not ended 10 s after it learned of this calls _exit with that code.
/// - The objects of `function` are destroyed before its exception is published. Collectives called
///   by their destructors are refused meanwhile (docs/architecture.md, "Failing").
///
/// `sections` declares sections of the program (declare_section), which --help shows. Unknown keys
/// are refused at the start, and settings without effect in the first step: see uses() and
/// Config::require_all_used. Returns on all ranks.
int run(int argc, const char* const* argv, const RunFunction& function,
        const std::vector<Section>& sections = {});

}  // namespace ddp
