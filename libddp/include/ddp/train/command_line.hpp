// SPDX-License-Identifier: Apache-2.0
// --help and --version of programs that do not use ddp::run, which answers them itself.
#pragma once

#include <string>

namespace ddp {

/// Returns whether the arguments have --help, -h or --version: then rank 0 has printed `usage`, or
/// the versions of libddp and the libraries it uses, and the program should end with 0.
bool answer_command_line(int argc, const char* const* argv, const std::string& usage);

}  // namespace ddp
