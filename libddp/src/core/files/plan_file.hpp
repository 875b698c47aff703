// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/files/plan.hpp"

namespace ddp {

/// Returns the text of a plan file; empty if the file does not exist. Throws ReadError.
std::string read_plan_file(const std::string& path);
/// Replaces the file atomically. Throws WriteError.
void write_plan_file(const std::string& path, const Plan& plan);

}  // namespace ddp
