// SPDX-License-Identifier: Apache-2.0
#include "common/data_path.hpp"

#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

namespace examples {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Returns the source folder that CMake recorded in a build folder.
std::optional<fs::path> source_folder_of(const fs::path& build_folder) {
  static const std::string kKey = "CMAKE_HOME_DIRECTORY:INTERNAL=";
  const auto path = build_folder / "CMakeCache.txt";
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) {
    return std::nullopt;  // an open would wait for the writer of a named pipe
  }
  std::ifstream cache(path);
  for (std::string line; std::getline(cache, line);) {
    if (line.compare(0, kKey.size(), kKey) == 0) {
      return fs::path(line.substr(kKey.size()));
    }
  }
  return std::nullopt;
}

}  // namespace

std::string find_data_path(const std::string& path) {
  if (path.empty() || fs::path(path).is_absolute() || is_there(path)) {
    return path;
  }
  std::error_code failed;
  const auto executable = fs::read_symlink("/proc/self/exe", failed);
  if (failed) {
    return path;
  }
  for (auto folder = executable.parent_path(); folder != folder.root_path();
       folder = folder.parent_path()) {
    for (const auto& candidate : {folder / path, folder / "share" / "ddp" / path}) {
      if (is_there(candidate)) {
        return candidate.string();
      }
    }
    if (const auto source = source_folder_of(folder); source && is_there(*source / path)) {
      return (*source / path).string();
    }
  }
  return path;
}

}  // namespace examples
