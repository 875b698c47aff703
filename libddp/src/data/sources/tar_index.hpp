// SPDX-License-Identifier: Apache-2.0
// Locates the files of a tar archive in one pass over the headers, without unpacking.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/sources/data_file.hpp"

namespace ddp::detail {

struct TarEntry {
  std::string name;    ///< relative, without "." parts and doubled slashes
  int64_t offset = 0;  ///< of the contents in the archive
  int64_t size = 0;
};

/// The regular files of the archive, in archive order. Reads ustar, GNU long names and pax `path`
/// and `size` records (POSIX.1-2001, "pax Interchange Format").
///
/// Archives are untrusted, so reading is strict. Throws DataError with path and offset for a wrong
/// checksum; names that are absolute, contain `..` or a NUL byte or exceed 255 bytes; links,
/// devices and other special entries; sizes beyond the archive; and a missing end mark (two zero
/// blocks), the sign of truncation at a block's end.
std::vector<TarEntry> read_tar_index(const DataFile& file);

}  // namespace ddp::detail
