// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file, read strictly and without LibTorch, so that it can be fuzzed.
//
//   u64 little endian n | n bytes of JSON, padded with spaces | tensor data
//   {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0,
//   24]}}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ddp::detail {

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 16u << 20;
inline constexpr std::size_t kMaxSafetensorsEntries = 100'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< the format's word: "F32", "BF16", …
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< bytes from the start of the data
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in order of their data
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  ///< of the first data byte in the file
};

/// Bytes of one element; 0 for a dtype the format does not have.
uint64_t safetensors_dtype_bytes(std::string_view dtype);

/// Length prefix of a file of `file_size` bytes, from its first 8 bytes. Throws ReadError naming
/// `path` where the header cannot be that long.
uint64_t parse_safetensors_length(const unsigned char* first8, uint64_t file_size,
                                  const std::string& path);

/// The JSON header. Throws ReadError naming `path` and the entry unless: it is one object of depth
/// <= 3 with at most 100,000 entries, no key twice and no zero byte; shape products (of what is not
/// 0) do not overflow and times dtype equal the bytes; the data is covered exactly, without gap or
/// overlap.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_size,
                                           const std::string& path);

/// The 8 length bytes and the JSON of `entries` (whose begin and end are filled in, largest element
/// first, so that every tensor is aligned), padded so that data starts at a multiple of 8. Throws
/// WriteError for what no file can hold: a text that is not UTF-8, the name "__metadata__".
std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata);

}  // namespace ddp::detail
