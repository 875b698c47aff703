// SPDX-License-Identifier: Apache-2.0
// --help and --version of programs that do not use ddp::run, which answers them itself.
#pragma once

#include <string>

namespace ddp {

/// Versions of libddp (with its commit, if known), LibTorch, CUDA, NCCL, cuDNN and MPI: as built,
/// and as loaded where that differs. Needs no GPU.
std::string version_text();

/// Returns whether the arguments have --help, -h or --version: then rank 0 has printed `usage` or
/// version_text(), and the program should end with 0.
bool answer_command_line(int argc, const char* const* argv, const std::string& usage);

}  // namespace ddp
