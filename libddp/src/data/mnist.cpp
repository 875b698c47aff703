// SPDX-License-Identifier: Apache-2.0
// MNIST's IDX files (http://yann.lecun.com/exdb/mnist): a magic number, the sizes of all dimensions
// as 32-bit numbers, most significant byte first, then bytes.
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "data/data_file.hpp"
#include "data/image_source.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kSide = 28;
constexpr int64_t kNumLabels = 10;
constexpr int64_t kImagesMagic = 0x803;  // bytes of three dimensions
constexpr int64_t kLabelsMagic = 0x801;
// A small compressed file must not expand to more.
constexpr size_t kMaxBytes = size_t{1} << 30;

using Bytes = std::vector<uint8_t>;

// The contents of a gzip file of one member.
Bytes decompress(const Bytes& packed, const std::string& path) {
  z_stream stream{};
  if (inflateInit2(&stream, 16 + MAX_WBITS) != Z_OK) {
    throw std::bad_alloc();
  }
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, &inflateEnd);
  Bytes out(std::min(kMaxBytes, 8 * packed.size() + 4096));
  stream.next_in = const_cast<uint8_t*>(packed.data());
  stream.avail_in = static_cast<uInt>(packed.size());
  int status = Z_OK;
  while (status == Z_OK) {
    if (stream.total_out == kMaxBytes) {
      throw DataError(concat("gzip file ", path, " expands to more than ", kMaxBytes,
                             " bytes, the limit; fix: decompress it"));
    }
    if (stream.total_out == out.size()) {
      out.resize(std::min(kMaxBytes, 2 * out.size()));
    }
    stream.next_out = out.data() + stream.total_out;
    stream.avail_out = static_cast<uInt>(out.size() - stream.total_out);
    status = inflate(&stream, Z_NO_FLUSH);
  }
  if (status == Z_STREAM_END && stream.avail_in != 0) {
    throw DataError(concat("gzip file ", path, " at offset ", stream.total_in, ": ",
                           stream.avail_in,
                           " bytes follow the end of the compressed data; fix: decompress it"));
  }
  if (status != Z_STREAM_END) {
    const char* why = status == Z_BUF_ERROR   ? "the file ends early"
                      : stream.msg != nullptr ? stream.msg
                                              : "damaged data";
    throw DataError(
        concat("gzip file ", path, " at offset ", stream.total_in, ": ", why, kDataFileFix));
  }
  out.resize(stream.total_out);
  return out;
}

struct IdxFile {
  std::string path;
  Bytes bytes = {};  // the whole file, decompressed
  int64_t num_items = 0;
  int64_t header_bytes = 0;
};

// Reads a file of items of `item_sizes` bytes, with or without .gz.
IdxFile read_idx(const std::string& folder, const std::string& name, int64_t magic,
                 const std::vector<int64_t>& item_sizes) {
  IdxFile idx{.path = folder + "/" + name};
  if (!fs::exists(idx.path) && fs::exists(idx.path + ".gz")) {
    idx.path += ".gz";
  }
  const DataFile file(idx.path);
  if (file.size() > static_cast<int64_t>(kMaxBytes)) {
    throw DataError(concat("MNIST file ", idx.path, " has ", file.size(), " bytes; the limit is ",
                           kMaxBytes, kDataFileFix));
  }
  idx.bytes.resize(static_cast<size_t>(file.size()));
  file.read_at(0, idx.bytes.data(), file.size());
  if (idx.bytes.size() >= 2 && idx.bytes[0] == 0x1f && idx.bytes[1] == 0x8b) {
    idx.bytes = decompress(idx.bytes, idx.path);
  }
  const auto fail = [&](int64_t offset, const auto&... what) {
    throw DataError(
        concat("MNIST file ", idx.path, " at offset ", offset, ": ", what..., kDataFileFix));
  };
  const int64_t num_bytes = std::ssize(idx.bytes);
  idx.header_bytes = 8 + 4 * std::ssize(item_sizes);
  if (num_bytes < idx.header_bytes) {
    fail(num_bytes, "the file ends within its header of ", idx.header_bytes, " bytes");
  }
  if (const int64_t found = big_endian_32(idx.bytes.data()); found != magic) {
    fail(0, "its magic number is ", found, " instead of ", magic);
  }
  idx.num_items = big_endian_32(idx.bytes.data() + 4);
  if (idx.num_items == 0) {
    fail(4, "the file has no items");
  }
  int64_t item_bytes = 1;
  for (size_t i = 0; i < item_sizes.size(); ++i) {
    const size_t at = 8 + 4 * i;
    if (const int64_t size = big_endian_32(idx.bytes.data() + at); size != item_sizes[i]) {
      fail(static_cast<int64_t>(at), "images have ", size, i == 0 ? " rows" : " columns",
           "; those of data.format=mnist have ", item_sizes[i]);
    }
    item_bytes *= item_sizes[i];
  }
  if (const int64_t expected = idx.header_bytes + idx.num_items * item_bytes;
      num_bytes != expected) {
    fail(std::min(num_bytes, expected), "the file has ", num_bytes, " bytes, but its ",
         idx.num_items, " items need ", expected);
  }
  return idx;
}

}  // namespace

std::string find_mnist(const std::string& folder) {
  std::string found;
  for (const char* place : {"", "raw", "MNIST/raw", "FashionMNIST/raw"}) {
    const fs::path candidate = *place == '\0' ? fs::path(folder) : fs::path(folder) / place;
    const auto has = [&](const char* name) { return fs::exists(candidate / name); };
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
  decoded.labels.assign(labels.bytes.begin() + labels.header_bytes, labels.bytes.end());
  for (size_t i = 0; i < decoded.labels.size(); ++i) {
    if (decoded.labels[i] >= kNumLabels) {
      throw DataError(concat(
          "MNIST file ", labels.path, " at offset ", labels.header_bytes + static_cast<int64_t>(i),
          ": label ", decoded.labels[i], "; labels are 0 to ", kNumLabels - 1, kDataFileFix));
    }
  }
  decoded.pixels.resize((images.bytes.size() - static_cast<size_t>(images.header_bytes)) * 3);
  uint8_t* out = decoded.pixels.data();
  for (auto value = images.bytes.begin() + images.header_bytes; value != images.bytes.end();
       ++value, out += 3) {
    std::fill_n(out, 3, *value);
  }
  return decoded;
}

}  // namespace ddp::detail
