// SPDX-License-Identifier: Apache-2.0
// Completion scripts for bash and zsh, made from the settings of a program.
#pragma once

#include <string>

#include "core/settings/setting_row.hpp"

namespace ddp {

/// The script that `PROGRAM --completion SHELL` prints; `shell` is bash or zsh. It completes
/// options, sections, keys, the values of enumerations, topics of --help and file names.
std::string completion_script(const std::string& shell, const std::string& program,
                              const SettingRows& defaults);

}  // namespace ddp
