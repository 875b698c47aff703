// SPDX-License-Identifier: Apache-2.0
// Where the files of a tar archive lie: one pass over the headers, nothing is unpacked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/data_file.hpp"

namespace ddp::detail {

struct TarEntry {
  std::string name;    ///< relative, without "." parts and doubled slashes
  int64_t offset = 0;  ///< of the contents in the archive
  int64_t size = 0;
};

/// The regular files of the archive, in its order. Reads ustar, GNU long names and pax `path` and
/// `size` records (POSIX.1-2001, "pax Interchange Format").
///
/// An archive comes from anywhere, so this is strict: throws DataError with path and offset for a
/// wrong checksum, names that are absolute, contain `..` or a NUL byte or exceed 255 bytes, links,
/// devices and other special entries, sizes beyond the archive, and an archive without its end mark
/// (two zero blocks), which is how a truncation at a block's end shows.
std::vector<TarEntry> read_tar_index(const DataFile& file);

}  // namespace ddp::detail
