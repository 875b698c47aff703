// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>

#include "data/data_file.hpp"
#include "data/image_source.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

constexpr int64_t kPlane = 32 * 32;
constexpr int64_t kRecord = 1 + 3 * kPlane;

void append_file(const std::string& path, DecodedImages& images) {
  const DataFile file(path);
  if (file.size() == 0 || file.size() % kRecord != 0) {
    throw DataError(
        concat("CIFAR-10 file ", path, " is truncated or damaged: ", file.size(),
               " bytes are not a multiple of a record's 3073; the last complete record ends "
               "at offset ",
               file.size() / kRecord * kRecord, kDataFileFix));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(file.size()));
  file.read_at(0, bytes.data(), file.size());
  const int64_t num_records = file.size() / kRecord;
  const size_t first = images.labels.size();
  images.labels.resize(first + static_cast<size_t>(num_records));
  images.pixels.resize(images.labels.size() * 3 * kPlane);
  for (int64_t i = 0; i < num_records; ++i) {
    const uint8_t* record = bytes.data() + i * kRecord;
    if (record[0] > 9) {
      throw DataError(concat("CIFAR-10 file ", path, " at offset ", i * kRecord, ": label ",
                             int{record[0]}, "; labels are 0 to 9, so no record begins here",
                             kDataFileFix));
    }
    images.labels[first + static_cast<size_t>(i)] = record[0];
    uint8_t* out = images.pixels.data() + (first + static_cast<size_t>(i)) * 3 * kPlane;
    for (int64_t p = 0; p < kPlane; ++p) {
      for (int64_t c = 0; c < 3; ++c) {
        out[3 * p + c] = record[1 + c * kPlane + p];
      }
    }
  }
}

}  // namespace

std::string find_cifar10(const std::string& folder) {
  namespace fs = std::filesystem;
  for (const fs::path& candidate : {fs::path(folder), fs::path(folder) / "cifar-10-batches-bin"}) {
    if (fs::exists(candidate / "data_batch_1.bin") || fs::exists(candidate / "test_batch.bin")) {
      return candidate.string();
    }
  }
  return {};
}

DecodedImages read_cifar10(const std::string& folder, Split split) {
  const std::string found = find_cifar10(folder);
  if (found.empty()) {
    throw DataError(concat("data.path=", folder,
                           " holds no CIFAR-10 binary files (data_batch_1.bin, test_batch.bin); "
                           "data/prepare_cifar10.py makes them"));
  }
  DecodedImages images;
  if (split == Split::Test) {
    append_file(found + "/test_batch.bin", images);
  } else {
    for (int i = 1; i <= 5; ++i) {
      append_file(concat(found, "/data_batch_", i, ".bin"), images);
    }
  }
  return images;
}

}  // namespace ddp::detail
