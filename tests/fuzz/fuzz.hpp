// SPDX-License-Identifier: Apache-2.0
// Shared by the libFuzzer targets. A new target is a file <target>_fuzz.cpp with
// LLVMFuzzerTestOneInput() and a folder corpus/<target> of small seeds; CMakeLists.txt finds it.
//
//   scripts/fuzz.sh 600 safetensors     # ten minutes
//   build-fuzz/bin/fuzz_safetensors INPUT   # repeats one input
//
// Readers may refuse an input with a ddp::Error. Any other exception ends the target, as does a
// failed require().
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/core/error.hpp"

namespace fuzz {

inline std::string_view view(const uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// A property of accepted inputs. Prints `what` and ends the target if it does not hold.
inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "fuzz: this does not hold: %s\n", what);
    std::abort();
  }
}

/// Whether `read` accepts its input. Refusals are errors of the library.
template <typename Read>
bool accepts(const Read& read) {
  try {
    read();
    return true;
  } catch (const ddp::Error&) {
    return false;
  }
}

/// What `read` makes of bytes that the library wrote. To refuse them is a fault.
template <typename Read>
auto read_back(const Read& read) {
  try {
    return read();
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "fuzz: what was written is refused: %s\n", error.what());
    std::abort();
  }
}

/// This process's folder for inputs of readers that take paths. scripts/fuzz.sh sets TMPDIR to a
/// folder in memory, and removes it.
inline const std::filesystem::path& folder() {
  static const auto path = [] {
    auto made = std::filesystem::temp_directory_path() / ("ddp_fuzz_" + std::to_string(::getpid()));
    std::filesystem::create_directories(made);
    return made;
  }();
  return path;
}

/// Writes `bytes` to the file `name` of folder() and returns its path.
inline std::string write_file(const std::string& name, std::string_view bytes) {
  const auto path = folder() / name;
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return path.string();
}

/// Splits at `separator`.
inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const auto end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(end + 1);
  }
}

}  // namespace fuzz
