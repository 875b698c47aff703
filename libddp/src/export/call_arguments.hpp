// SPDX-License-Identifier: Apache-2.0
// Python's call convention: arguments of a forward as the flat inputs of a program, and back.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

/// One value per user input and constant input of `program`, in their order. Throws SettingsError
/// naming the argument: missing, unknown, given twice, of another structure, or another value where
/// the export fixed it.
std::vector<c10::IValue> flat_arguments(const ExportedProgram& program,
                                        const std::vector<c10::IValue>& positional,
                                        const std::map<std::string, c10::IValue>& keywords);

}  // namespace ddp::detail
