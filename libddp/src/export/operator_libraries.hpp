// SPDX-License-Identifier: Apache-2.0
// Shared objects that register custom operators.
#pragma once

#include <string>
#include <vector>

namespace ddp::detail {

/// Loads the shared objects in this order, and keeps them. Libraries of Python's packages load too
/// if they use nothing of Python, although PyTorch links them with libtorch_python.so. Throws
/// SettingsError for one that does not load.
void load_operator_libraries(const std::vector<std::string>& libraries);

}  // namespace ddp::detail
