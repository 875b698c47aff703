// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace examples {

/// Finds a relative path that a program ships with ("data/cifar10-sample"), independent of the
/// working folder. Tries the working folder, then every folder above the executable: a build folder
/// inside the sources, or the install tree's share/ddp. Then it tries the source folder named in
/// the build folder's CMakeCache.txt. Returns absolute and unknown paths unchanged; opening them
/// reports the error.
std::string find_data_path(const std::string& path);

}  // namespace examples
