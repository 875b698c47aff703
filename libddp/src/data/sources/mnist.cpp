// SPDX-License-Identifier: Apache-2.0
// MNIST's IDX files (http://yann.lecun.com/exdb/mnist): a magic number, the sizes of all dimensions
// as 32-bit numbers, most significant byte first, then bytes.
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <new>
#include <string>
#include <vector>

#include "data/sources/data_file.hpp"
#include "data/sources/image_source.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/file_content.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kSide = 28;
constexpr int64_t kNumLabels = 10;
constexpr int64_t kImagesMagic = 0x803;  // bytes of three dimensions
constexpr int64_t kLabelsMagic = 0x801;
constexpr int64_t kMaxBytes = int64_t{1} << 30;

using Bytes = std::vector<uint8_t>;

// The bytes of a file in order. A gzip file of one member is decompressed, block by block.
class IdxReader {
 public:
  explicit IdxReader(const std::string& path) : file_(path), start_(file_.start(kContentBytes)) {
    is_packed_ = start_.starts_with("\x1f\x8b");
    if (is_packed_ && inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK) {
      throw std::bad_alloc();
    }
  }
  ~IdxReader() {
    if (is_packed_) {
      inflateEnd(&stream_);
    }
  }
  IdxReader(const IdxReader&) = delete;
  IdxReader& operator=(const IdxReader&) = delete;

  bool is_packed() const { return is_packed_; }
  int64_t file_bytes() const { return file_.size(); }
  /// What a file is that begins like none of these.
  std::string note() const { return is_packed_ ? "" : content_note(start_); }

  /// Returns the number of bytes read: less than num_bytes only at the end.
  int64_t read(uint8_t* out, int64_t num_bytes) {
    if (is_packed_) {
      return decompress(out, num_bytes);
    }
    const int64_t count = std::min(num_bytes, file_.size() - offset_);
    file_.read_at(offset_, out, count);
    offset_ += count;
    return count;
  }

 private:
  int64_t decompress(uint8_t* out, int64_t num_bytes) {
    const uLong before = stream_.total_out;
    stream_.next_out = out;
    stream_.avail_out = static_cast<uInt>(num_bytes);
    while (stream_.avail_out > 0 && !is_at_end_) {
      if (stream_.avail_in == 0) {
        refill();
      }
      const int status = inflate(&stream_, Z_NO_FLUSH);
      is_at_end_ = status == Z_STREAM_END;
      if (status != Z_OK && !is_at_end_) {
        fail(status == Z_BUF_ERROR    ? "the file ends early"
             : stream_.msg != nullptr ? stream_.msg
                                      : "damaged data");
      }
    }
    if (const int64_t rest = file_.size() - static_cast<int64_t>(stream_.total_in);
        is_at_end_ && rest > 0) {
      throw DataError(concat("gzip file ", file_.path(), " at offset ", stream_.total_in, ": ",
                             rest,
                             " bytes follow the end of the compressed data; fix: decompress it"));
    }
    return static_cast<int64_t>(stream_.total_out - before);
  }

  void refill() {
    block_.resize(static_cast<size_t>(std::min<int64_t>(1 << 16, file_.size() - offset_)));
    file_.read_at(offset_, block_.data(), std::ssize(block_));
    offset_ += std::ssize(block_);
    stream_.next_in = block_.data();
    stream_.avail_in = static_cast<uInt>(block_.size());
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw DataError(concat("gzip file ", file_.path(), " at offset ", stream_.total_in, ": ", why,
                           kDataFileFix));
  }

  DataFile file_;
  std::string start_;
  bool is_packed_ = false;
  bool is_at_end_ = false;  // of the compressed data
  int64_t offset_ = 0;
  z_stream stream_{};
  Bytes block_;
};

struct IdxFile {
  std::string path;
  Bytes items = {};
  int64_t num_items = 0;
  int64_t header_bytes = 0;
};

[[noreturn]] void fail(const IdxFile& idx, int64_t offset, const std::string& why) {
  throw DataError(concat("MNIST file ", idx.path, " at offset ", offset, ": ", why, kDataFileFix));
}

// Reads the header of items of `item_sizes` bytes. Returns the bytes of all items.
int64_t read_idx_header(IdxReader& reader, int64_t magic, const std::vector<int64_t>& item_sizes,
                        IdxFile& idx) {
  idx.header_bytes = 8 + 4 * std::ssize(item_sizes);
  Bytes header(static_cast<size_t>(idx.header_bytes));
  if (const int64_t count = reader.read(header.data(), idx.header_bytes);
      count < idx.header_bytes) {
    fail(idx, count,
         concat("the file ends within its header of ", idx.header_bytes, " bytes", reader.note()));
  }
  if (const int64_t found = big_endian_32(header.data()); found != magic) {
    fail(idx, 0, concat("its magic number is ", found, " instead of ", magic, reader.note()));
  }
  idx.num_items = big_endian_32(header.data() + 4);
  if (idx.num_items == 0) {
    fail(idx, 4, "the file has no items");
  }
  int64_t num_bytes = idx.num_items;
  for (size_t i = 0; i < item_sizes.size(); ++i) {
    const size_t at = 8 + 4 * i;
    if (const int64_t size = big_endian_32(header.data() + at); size != item_sizes[i]) {
      fail(idx, static_cast<int64_t>(at),
           concat("images have ", size, i == 0 ? " rows" : " columns",
                  "; those of data.format=mnist have ", item_sizes[i]));
    }
    num_bytes *= item_sizes[i];
  }
  return num_bytes;
}

// Reads a file of items of `item_sizes` bytes, with or without .gz. The header bounds the memory,
// so that a small compressed file cannot expand to gigabytes.
IdxFile read_idx(const std::string& folder, const std::string& name, int64_t magic,
                 const std::vector<int64_t>& item_sizes) {
  IdxFile idx{.path = folder + "/" + name};
  if (!path_exists(idx.path) && path_exists(idx.path + ".gz")) {
    idx.path += ".gz";
  }
  IdxReader reader(idx.path);
  const int64_t num_bytes = read_idx_header(reader, magic, item_sizes, idx);
  const int64_t expected = idx.header_bytes + num_bytes;
  const auto fail_size = [&](int64_t found, const char* more) {
    fail(idx, std::min(found, expected),
         concat("the file has ", more, found, " bytes, but its ", idx.num_items, " items need ",
                expected));
  };
  if (!reader.is_packed() && reader.file_bytes() != expected) {
    fail_size(reader.file_bytes(), "");
  }
  if (num_bytes > kMaxBytes) {
    fail(idx, 4,
         concat("its ", idx.num_items, " items need ", num_bytes, " bytes; the limit is ",
                kMaxBytes));
  }
  constexpr int64_t kBlock = 16 << 20;  // memory grows as data arrives
  for (int64_t done = 0; done < num_bytes;) {
    idx.items.resize(static_cast<size_t>(std::min(num_bytes, done + std::max(done, kBlock))));
    const int64_t wanted = std::ssize(idx.items) - done;
    const int64_t count = reader.read(idx.items.data() + done, wanted);
    done += count;
    if (count < wanted) {
      fail_size(idx.header_bytes + done, "");
    }
  }
  uint8_t surplus = 0;
  if (reader.read(&surplus, 1) != 0) {
    fail_size(expected, "more than ");
  }
  return idx;
}

}  // namespace

std::string find_mnist(const std::string& folder) {
  std::string found;
  for (const char* place : {"", "raw", "MNIST/raw", "FashionMNIST/raw"}) {
    const fs::path candidate = *place == '\0' ? fs::path(folder) : fs::path(folder) / place;
    const auto has = [&](const char* name) { return path_exists(candidate / name); };
    if (!has("train-images-idx3-ubyte") && !has("train-images-idx3-ubyte.gz") &&
        !has("t10k-images-idx3-ubyte") && !has("t10k-images-idx3-ubyte.gz")) {
      continue;
    }
    if (!found.empty()) {
      throw DataError(concat("data.path=", folder, " holds two data sets, ", found, " and ",
                             candidate.string(), "; fix: set data.path to one of these folders"));
    }
    found = candidate.string();
  }
  return found;
}

DecodedImages read_mnist(const std::string& folder, Split split) {
  const std::string found = find_mnist(folder);
  if (found.empty()) {
    throw DataError(concat("data.path=", folder,
                           " holds no MNIST files (train-images-idx3-ubyte, "
                           "train-labels-idx1-ubyte, the same with t10k-; or with .gz); "
                           "fix: set data.path to the folder of these files"));
  }
  const std::string prefix = split == Split::Train ? "train" : "t10k";
  const IdxFile images =
      read_idx(found, prefix + "-images-idx3-ubyte", kImagesMagic, {kSide, kSide});
  const IdxFile labels = read_idx(found, prefix + "-labels-idx1-ubyte", kLabelsMagic, {});
  if (images.num_items != labels.num_items) {
    throw DataError(concat("MNIST file ", labels.path, " at offset 4: ", labels.num_items,
                           " labels, but ", images.path, " has ", images.num_items, " images",
                           kDataFileFix));
  }
  DecodedImages decoded;
  decoded.labels.assign(labels.items.begin(), labels.items.end());
  for (size_t i = 0; i < decoded.labels.size(); ++i) {
    if (decoded.labels[i] >= kNumLabels) {
      throw DataError(concat(
          "MNIST file ", labels.path, " at offset ", labels.header_bytes + static_cast<int64_t>(i),
          ": label ", decoded.labels[i], "; labels are 0 to ", kNumLabels - 1, kDataFileFix));
    }
  }
  decoded.pixels.resize(images.items.size() * 3);
  uint8_t* out = decoded.pixels.data();
  for (const uint8_t value : images.items) {
    out = std::fill_n(out, 3, value);
  }
  return decoded;
}

}  // namespace ddp::detail
