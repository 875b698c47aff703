// SPDX-License-Identifier: Apache-2.0
// Inputs of the safetensors format in a form that mutates well.
#pragma once

#include <string>
#include <string_view>

namespace fuzz {

/// An input that begins with "{" is a header of one line and then the data. It gets the length of
/// the header. Any other input is the file.
inline std::string safetensors_file(std::string_view input) {
  if (!input.starts_with('{')) {
    return std::string(input);
  }
  const auto end = input.find('\n');
  const auto header = input.substr(0, end);
  const auto data = end == std::string_view::npos ? "" : input.substr(end + 1);
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) {
    file += static_cast<char>(static_cast<uint64_t>(header.size()) >> shift & 0xff);
  }
  return file.append(header).append(data);
}

}  // namespace fuzz
