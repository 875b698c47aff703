// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "core/settings/command_line.hpp"
#include "ddp/core/fields.hpp"

namespace ddp::detail {

/// Versions of libddp (with its commit, if known), LibTorch, CUDA, NCCL, cuDNN and MPI: as built,
/// and as loaded where that differs. Needs no GPU.
std::string version_text();

/// Rank 0 prints what --help, --version or --completion asks for. Returns whether there was such an
/// option: then the program ends. Throws SettingsError for an unknown topic.
bool print_help_or_version(const CommandLine& line, const std::string& program,
                           const std::vector<Section>& sections);

}  // namespace ddp::detail
