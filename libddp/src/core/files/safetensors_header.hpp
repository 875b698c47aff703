// SPDX-License-Identifier: Apache-2.0
// Strict parser of the safetensors header, without LibTorch so that it can be fuzzed.
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
  std::string dtype;  ///< the format's name: "F32", "BF16", …
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< bytes from the start of the data
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< ordered by data offset
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  ///< offset of the first data byte in the file
};

/// Bytes per element; 0 for a dtype that the format lacks.
uint64_t safetensors_dtype_bytes(std::string_view dtype);

/// Reads the header length from the first 8 bytes of a file of `file_size` bytes. Throws ReadError
/// naming `path` if the length is impossible.
uint64_t parse_safetensors_length(const unsigned char* first8, uint64_t file_size,
                                  const std::string& path);

/// Parses the JSON header. It must be one object of depth <= 3 with at most 100,000 entries, no
/// duplicate key and no zero byte. Products of nonzero dimensions must not overflow, shape times
/// dtype must equal the bytes, and data must have no gap or overlap. Otherwise throws ReadError
/// naming `path` and the entry.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_size,
                                           const std::string& path);

/// Returns the 8 length bytes and the JSON of `entries`, padded so that data starts at a multiple
/// of 8. Sets begin and end of each entry, largest element first, so that every tensor is aligned.
/// Throws WriteError for a name or text that is not UTF-8 and for the name "__metadata__".
std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata);

}  // namespace ddp::detail
