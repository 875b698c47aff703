// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace examples {

/// Finds a relative path that a program ships with ("data/cifar10-sample") wherever it was started:
/// below the working folder, else below any folder above the executable (a build folder inside the
/// sources, the moved install tree's share/ddp), else below the source folder that the build
/// folder's CMakeCache.txt names. Absolute and unknown paths come back unchanged: whoever opens
/// them reports.
std::string find_data_path(const std::string& path);

}  // namespace examples
