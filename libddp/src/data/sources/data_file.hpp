// SPDX-License-Identifier: Apache-2.0
// A data file that any number of threads can read at offsets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ddp::detail {

/// The fix in messages about missing or damaged data files.
inline constexpr const char* kDataFileFix =
    "; fix: fetch or prepare the file again (data/README.md)";

/// The type of the file at `path`, links followed; not_found if there is none. Throws DataError
/// with the system's reason if the type cannot be determined, as in a loop of links.
std::filesystem::file_type file_type_of(const std::filesystem::path& path);
bool path_exists(const std::filesystem::path& path);  ///< throws as file_type_of

/// The lines of a text file that are not empty, without line ends (LF or CRLF) and byte order mark.
/// Throws DataError naming the path and the system's reason, also for more than 64 MiB.
std::vector<std::string> read_names(const std::string& path);

/// Reads a 32-bit unsigned number, most significant byte first.
inline int64_t big_endian_32(const uint8_t* at) {
  return int64_t{at[0]} << 24 | int64_t{at[1]} << 16 | int64_t{at[2]} << 8 | int64_t{at[3]};
}

class DataFile {
 public:
  /// Throws DataError naming the path and the system's reason, also for anything but a regular
  /// file.
  explicit DataFile(const std::string& path);
  ~DataFile();
  DataFile(DataFile&& other) noexcept;
  DataFile& operator=(DataFile&&) = delete;
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  /// Reads exactly `num_bytes` from `offset`. Throws DataError naming path and offset on a read
  /// error or an earlier end of the file (the file may have been cut after opening). Callable from
  /// any thread.
  void read_at(int64_t offset, void* out, int64_t num_bytes) const;

  /// The first `num_bytes`, or all if there are fewer.
  std::string start(int64_t num_bytes) const;

  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace ddp::detail
