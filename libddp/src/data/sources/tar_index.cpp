// SPDX-License-Identifier: Apache-2.0
#include "data/sources/tar_index.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "ddp/core/error.hpp"
#include "ddp/detail/file_content.hpp"

namespace ddp::detail {

namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kMaxName = 255;
constexpr int64_t kMaxExtendedHeader = 64 * 1024;
constexpr int64_t kMaxEntries = 100'000'000;

using Block = std::array<char, kBlock>;

// The fields of a header block: offset and length.
struct FieldAt {
  size_t offset;
  size_t length;
};
constexpr FieldAt kName{0, 100}, kSize{124, 12}, kChecksum{148, 8}, kMagic{257, 5},
    kPrefix{345, 155};
constexpr size_t kTypeOffset = 156;

[[noreturn]] void fail(const DataFile& file, int64_t offset, const std::string& what) {
  throw DataError(
      concat("tar archive ", file.path(), " at offset ", offset, ": ", what, kDataFileFix));
}

std::string_view text_of(const Block& block, FieldAt field) {
  std::string_view text(block.data() + field.offset, field.length);
  return text.substr(0, std::min(text.find('\0'), text.size()));
}

// Reads octal digits, or GNU's base-256 if the first bit is set; otherwise nullopt.
std::optional<int64_t> number_of(const Block& block, FieldAt field) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(block.data()) + field.offset;
  int64_t value = 0;
  if (bytes[0] & 0x80) {
    for (size_t i = 0; i < field.length; ++i) {
      const int64_t digit = i == 0 ? bytes[i] & 0x7f : bytes[i];
      if (value > (INT64_MAX >> 8)) {
        return std::nullopt;
      }
      value = value * 256 + digit;
    }
    return value;
  }
  size_t i = 0;
  while (i < field.length && bytes[i] == ' ') {
    ++i;
  }
  const size_t first = i;
  for (; i < field.length && bytes[i] >= '0' && bytes[i] <= '7'; ++i) {
    value = value * 8 + (bytes[i] - '0');  // at most 12 digits: fits
  }
  const bool ends_well = i == field.length || bytes[i] == ' ' || bytes[i] == '\0';
  return i > first && ends_well ? std::optional(value) : std::nullopt;
}

bool checksum_matches(const Block& block) {
  const auto stored = number_of(block, kChecksum);
  int64_t sum = 0;
  for (size_t i = 0; i < block.size(); ++i) {
    const bool own = i >= kChecksum.offset && i < kChecksum.offset + kChecksum.length;
    sum += own ? ' ' : static_cast<unsigned char>(block[i]);
  }
  return stored == sum;
}

bool is_zero(const Block& block) {
  return std::all_of(block.begin(), block.end(), [](char c) { return c == 0; });
}

// Removes "./" and doubled slashes. Throws DataError for a name that leaves the archive.
std::string clean_name(const DataFile& file, int64_t offset, const std::string& name) {
  if (name.empty() || static_cast<int64_t>(name.size()) > kMaxName) {
    fail(file, offset, concat("a name of ", name.size(), " bytes; 1 to 255 are allowed"));
  }
  if (name.find('\0') != std::string::npos) {
    fail(file, offset, "a name with a NUL byte");
  }
  if (name.front() == '/') {
    fail(file, offset, concat("the absolute name ", name, "; names must be relative"));
  }
  std::string clean;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = std::string_view(name).substr(begin, end - begin);
    if (part == "..") {
      fail(file, offset, concat("the name ", name, " contains '..'"));
    }
    if (!part.empty() && part != ".") {
      clean.append(clean.empty() ? "" : "/").append(part);
    }
    begin = end + 1;
  }
  return clean;
}

// Values of extended headers for the next entry.
struct Override {
  std::optional<std::string> name;
  std::optional<int64_t> size;
};

std::optional<int64_t> decimal(std::string_view text) {
  if (text.empty() || text.size() > 18) {
    return std::nullopt;
  }
  int64_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') {
      return std::nullopt;
    }
    value = value * 10 + (c - '0');
  }
  return value;
}

// Records "LENGTH KEY=VALUE\n", LENGTH counting the whole record.
void parse_pax(const DataFile& file, int64_t offset, std::string_view text, Override& result) {
  while (!text.empty() && text.front() != '\0') {
    const size_t space = text.find(' ');
    const auto length =
        space == std::string_view::npos ? std::nullopt : decimal(text.substr(0, space));
    if (!length || *length <= static_cast<int64_t>(space) + 1 ||
        *length > static_cast<int64_t>(text.size()) ||
        text[static_cast<size_t>(*length) - 1] != '\n') {
      fail(file, offset, "a malformed pax header");
    }
    const auto end = static_cast<size_t>(*length);
    const std::string_view record = text.substr(space + 1, end - space - 2);
    const size_t equals = record.find('=');
    if (equals == std::string_view::npos) {
      fail(file, offset, "a malformed pax header");
    }
    const std::string_view key = record.substr(0, equals), value = record.substr(equals + 1);
    if (key == "path") {
      result.name = std::string(value);
    } else if (key == "size") {
      result.size = decimal(value);
      if (!result.size) {
        fail(file, offset, "a malformed size in a pax header");
      }
    } else if (key.starts_with("GNU.sparse")) {
      fail(file, offset,
           "a sparse file, which is not supported; make the archive without --sparse");
    }
    text.remove_prefix(end);
  }
}

class Scanner {
 public:
  explicit Scanner(const DataFile& file) : file_(file) {}

  std::vector<TarEntry> run() {
    Block block;
    while (true) {
      read_block(block);
      if (is_zero(block)) {
        read_block(block);
        if (!is_zero(block)) {
          fail(file_, offset_ - kBlock, "a single zero block inside the archive");
        }
        return std::move(entries_);
      }
      entry(block);
    }
  }

 private:
  // What the file is, if its first block is no header of an archive.
  std::string note() const {
    const std::string start = file_.start(kBlock);
    const bool is_archive =
        !entries_.empty() ||
        start.substr(std::min(start.size(), kMagic.offset)).starts_with("ustar");
    return is_archive ? "" : content_note(start);
  }

  void read_block(Block& block) {
    if (offset_ + kBlock > file_.size()) {
      fail(file_, offset_,
           "the archive is truncated (its end mark of two zero blocks is missing)" + note());
    }
    file_.read_at(offset_, block.data(), kBlock);
    offset_ += kBlock;
  }

  void entry(const Block& block) {
    const int64_t header = offset_ - kBlock;
    if (!checksum_matches(block)) {
      fail(file_, header, "not a tar header (wrong checksum)" + note());
    }
    auto size = number_of(block, kSize);
    const char type = block[kTypeOffset];
    if (type != 'x' && type != 'g' && type != 'L' && override_.size) {
      size = override_.size;
    }
    if (!size) {
      fail(file_, header, "a malformed size");
    }
    if (*size > file_.size() - offset_) {
      fail(file_, header,
           concat("an entry of ", *size, " bytes, but only ", file_.size() - offset_,
                  " follow: the archive is truncated or corrupt"));
    }
    switch (type) {
      case 'x':
      case 'g':
      case 'L':
        extended(type, header, *size);
        break;
      case '\0':
      case '0':
      case '7':
        regular(block, header, *size);
        break;
      case '5':
        (void)clean_name(file_, header, name_of(block));
        override_ = {};
        break;
      case '1':
      case '2':
        fail(file_, header,
             concat("the link ", name_of(block), "; only regular files are allowed"));
      default:
        fail(file_, header,
             concat("the special entry ", name_of(block), " of type '", type,
                    "'; only regular files are allowed"));
    }
    offset_ += (*size + kBlock - 1) / kBlock * kBlock;
  }

  void extended(char type, int64_t header, int64_t size) {
    if (size > kMaxExtendedHeader) {
      fail(file_, header,
           concat("an extended header of ", size, " bytes; at most 65536 are allowed"));
    }
    std::string text(static_cast<size_t>(size), '\0');
    file_.read_at(offset_, text.data(), size);
    if (type == 'L') {
      override_.name = text.substr(0, text.find('\0'));
    } else if (type == 'x') {
      parse_pax(file_, header, text, override_);
    }
  }

  void regular(const Block& block, int64_t header, int64_t size) {
    if (static_cast<int64_t>(entries_.size()) >= kMaxEntries) {
      fail(file_, header, "more than 100,000,000 entries");
    }
    std::string name = clean_name(file_, header, name_of(block));
    if (name.empty()) {
      fail(file_, header, concat("the name ", name_of(block), " names no file"));
    }
    entries_.push_back({std::move(name), offset_, size});
    override_ = {};
  }

  std::string name_of(const Block& block) const {
    if (override_.name) {
      return *override_.name;
    }
    std::string name(text_of(block, kName));
    const auto prefix = text_of(block, kPrefix);
    const bool ustar = std::string_view(block.data() + kMagic.offset, kMagic.length) == "ustar";
    // GNU's old format ("ustar  ") stores times in the field of POSIX's prefix.
    const bool posix = ustar && block[kMagic.offset + kMagic.length] == '\0';
    return posix && !prefix.empty() ? concat(prefix, "/", name) : name;
  }

  const DataFile& file_;
  int64_t offset_ = 0;
  Override override_;
  std::vector<TarEntry> entries_;
};

}  // namespace

std::vector<TarEntry> read_tar_index(const DataFile& file) {
  return Scanner(file).run();
}

}  // namespace ddp::detail
