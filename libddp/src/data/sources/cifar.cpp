// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>

#include "data/sources/data_file.hpp"
#include "data/sources/image_source.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/file_content.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kPlane = 32 * 32;

/// The records of a data set: label bytes, then pixels. The last label is the class.
struct CifarRecords {
  const char* name;
  std::vector<int> num_labels;  // of each label byte
  int64_t num_bytes() const { return std::ssize(num_labels) + 3 * kPlane; }
};

// The record's class.
int64_t read_label(const CifarRecords& records, const uint8_t* record, const std::string& path,
                   int64_t offset) {
  for (size_t i = 0; i < records.num_labels.size(); ++i) {
    if (record[i] >= records.num_labels[i]) {
      throw DataError(concat(records.name, " file ", path, " at offset ",
                             offset + static_cast<int64_t>(i), ": label ", int{record[i]},
                             "; labels are 0 to ", records.num_labels[i] - 1,
                             ", so no record begins here", kDataFileFix));
    }
  }
  return record[records.num_labels.size() - 1];
}

void append_file(const CifarRecords& records, const std::string& path, DecodedImages& images) {
  const int64_t record_bytes = records.num_bytes();
  const DataFile file(path);
  if (file.size() == 0 || file.size() % record_bytes != 0) {
    throw DataError(concat(records.name, " file ", path, " is truncated or damaged: ", file.size(),
                           " bytes are not a multiple of a record's ", record_bytes,
                           "; the last complete record ends at offset ",
                           file.size() / record_bytes * record_bytes,
                           content_note(file.start(kContentBytes)), kDataFileFix));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(file.size()));
  file.read_at(0, bytes.data(), file.size());
  const int64_t num_records = file.size() / record_bytes;
  const size_t first = images.labels.size();
  images.labels.resize(first + static_cast<size_t>(num_records));
  images.pixels.resize(images.labels.size() * 3 * kPlane);
  for (int64_t i = 0; i < num_records; ++i) {
    const uint8_t* record = bytes.data() + i * record_bytes;
    images.labels[first + static_cast<size_t>(i)] =
        read_label(records, record, path, i * record_bytes);
    const uint8_t* planes = record + records.num_labels.size();
    uint8_t* out = images.pixels.data() + (first + static_cast<size_t>(i)) * 3 * kPlane;
    for (int64_t p = 0; p < kPlane; ++p) {
      for (int64_t c = 0; c < 3; ++c) {
        out[3 * p + c] = planes[c * kPlane + p];
      }
    }
  }
}

}  // namespace

std::string find_cifar10(const std::string& folder) {
  for (const fs::path& candidate : {fs::path(folder), fs::path(folder) / "cifar-10-batches-bin"}) {
    if (path_exists(candidate / "data_batch_1.bin") || path_exists(candidate / "test_batch.bin")) {
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
                           "fix: make them with data/prepare_cifar10.py"));
  }
  const CifarRecords records{"CIFAR-10", {10}};
  DecodedImages images;
  if (split == Split::Test) {
    append_file(records, found + "/test_batch.bin", images);
  } else {
    for (int i = 1; i <= 5; ++i) {
      append_file(records, concat(found, "/data_batch_", i, ".bin"), images);
    }
  }
  const std::string names = found + "/batches.meta.txt";  // other sets of this format have others
  images.class_names = path_exists(names) ? read_names(names) : std::vector<std::string>{};
  if (images.class_names.size() != 10) {
    images.class_names = {"airplane", "automobile", "bird",  "cat",  "deer",
                          "dog",      "frog",       "horse", "ship", "truck"};
  }
  return images;
}

std::string find_cifar100(const std::string& folder) {
  for (const fs::path& candidate : {fs::path(folder), fs::path(folder) / "cifar-100-binary"}) {
    // Other data sets also name their files train.bin.
    if (path_exists(candidate / "fine_label_names.txt") &&
        (path_exists(candidate / "train.bin") || path_exists(candidate / "test.bin"))) {
      return candidate.string();
    }
  }
  return {};
}

DecodedImages read_cifar100(const std::string& folder, Split split) {
  const std::string found = find_cifar100(folder);
  if (found.empty()) {
    throw DataError(concat("data.path=", folder,
                           " holds no CIFAR-100 binary files (train.bin, test.bin, "
                           "fine_label_names.txt); fix: unpack cifar-100-binary.tar.gz there"));
  }
  const CifarRecords records{"CIFAR-100", {20, 100}};
  DecodedImages images;
  append_file(records, found + (split == Split::Train ? "/train.bin" : "/test.bin"), images);
  const std::string names = found + "/fine_label_names.txt";
  images.class_names = read_names(names);
  if (images.class_names.size() != 100) {
    throw DataError(concat("class names ", names, ": the file has ", images.class_names.size(),
                           " names, but needs 100, one per line", kDataFileFix));
  }
  return images;
}

}  // namespace ddp::detail
