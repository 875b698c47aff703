// SPDX-License-Identifier: Apache-2.0
// A program's main in one call: settings, context, signals, exit codes.
#pragma once

#include <functional>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/config.hpp"

namespace ddp {

using RunFunction = std::function<void(Context& context, const Config& config)>;

/// Reads the settings, joins the job, calls `function` and returns the exit code for main.
///
/// - `--help` prints every key and returns 0. Wrong settings return 64 before a GPU is touched.
/// - All ranks must have the same settings, but for those that may differ (folders); else all
///   return 70 and say which differs.
/// - SIGTERM, SIGUSR1 and the first Ctrl-C ask for a stop, on which the ranks agree in
///   Checkpointer::save_if_due; a program without a Checkpointer asks StopSignal itself. A second
///   Ctrl-C leaves at once. `ddp::Stop` is no failure: the job ends in order, with code 75.
/// - SIGPIPE is ignored from here on, unless the program handles it: where nobody reads the output
///   any more (`prog | head`) lines are lost, and training and saving go on.
/// - An exception that leaves `function` is published to all ranks. Every rank returns the code of
///   the first cause: Error::exit_code(), 1 for other exceptions. Rank 0 shows its message and
///   rank. A rank that cannot end within 10 s of that leaves without unwinding.
/// - The objects of `function` are destroyed before its exception is published. No destructor of
/// the
///   library waits for other ranks then, and collectives called by other destructors are refused.
///
/// `own_sections` announces sections of the program (declare_section), so that --help shows them
/// and unknown keys are refused at the start; without it they are refused when the first step
/// begins. With uses() it also names the fields of the library's section train on which the
/// program's own loop acts. Settings that nothing uses are refused: fields of that section at the
/// start, sections that no object of the library took after the first step; see
/// Config::require_all_used. Returns on all ranks.
int run(int argc, const char* const* argv, const RunFunction& function,
        const std::vector<Section>& own_sections = {});

/// The code a process should end with for `exception`, and the message to show.
ExitCode exit_code_of(const std::exception& exception);
std::string message_of(const std::exception& exception);

}  // namespace ddp
