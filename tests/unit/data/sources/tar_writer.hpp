// SPDX-License-Identifier: Apache-2.0
// Creates valid and invalid tar archives in memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace data_test {

/// Header and contents of an entry, padded. `claimed_size` goes into the header (-1: the real
/// size).
inline std::string tar_entry(const std::string& name, const std::string& contents, char type = '0',
                             const std::string& prefix = "", int64_t claimed_size = -1) {
  std::string header(512, '\0');
  auto put = [&](size_t offset, const std::string& text) {
    std::memcpy(&header[offset], text.data(), text.size());
  };
  char number[16];
  put(0, name.substr(0, 100));
  put(100, "0000644");
  std::snprintf(number, sizeof(number), "%011llo",
                static_cast<unsigned long long>(
                    claimed_size >= 0 ? claimed_size : static_cast<int64_t>(contents.size())));
  put(124, number);
  put(136, "00000000000");
  header[156] = type;
  put(257, std::string("ustar\00000", 8));
  put(345, prefix);
  put(148, "        ");
  unsigned sum = 0;
  for (char c : header) {
    sum += static_cast<unsigned char>(c);
  }
  std::snprintf(number, sizeof(number), "%06o", sum);
  put(148, std::string(number) + '\0' + ' ');
  std::string padded = contents;
  padded.resize((contents.size() + 511) / 512 * 512, '\0');
  return header + padded;
}

inline std::string tar_end() {
  return std::string(1024, '\0');
}

}  // namespace data_test
