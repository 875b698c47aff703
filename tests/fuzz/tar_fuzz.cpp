// SPDX-License-Identifier: Apache-2.0
// A tar shard. The checksums of blocks with tar's magic word are corrected, so that changed headers
// reach the reader.
#include "data/sources/data_file.hpp"
#include "data/sources/image_source.hpp"
#include "data/sources/tar_index.hpp"
#include "fuzz/fuzz.hpp"

namespace {

constexpr std::size_t kBlock = 512, kChecksum = 148, kMagic = 257;

void correct_checksums(std::string& archive) {
  for (std::size_t at = 0; at + kBlock <= archive.size(); at += kBlock) {
    if (archive.compare(at + kMagic, 5, "ustar") != 0) {
      continue;
    }
    archive.replace(at + kChecksum, 8, "        ");
    unsigned sum = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      sum += static_cast<unsigned char>(archive[at + i]);
    }
    char digits[8];
    std::snprintf(digits, sizeof digits, "%06o", sum);
    archive.replace(at + kChecksum, 7, digits, 7);
  }
}

void read_index(const std::string& path) {
  const ddp::detail::DataFile file(path);
  int64_t before = 0;
  for (const auto& entry : ddp::detail::read_tar_index(file)) {
    fuzz::require(
        entry.offset > before && entry.size >= 0 && entry.size <= file.size() - entry.offset,
        "contents lie in the archive, one after the other");
    fuzz::require(!entry.name.empty() && entry.name.front() != '/' &&
                      ("/" + entry.name + "/").find("/../") == std::string::npos,
                  "names stay in the folder");
    before = entry.offset;
  }
}

void read_samples() {
  const auto source = ddp::detail::open_tar_source(fuzz::folder().string(), ddp::Split::Train);
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < source->size(); ++i) {
    fuzz::require(source->label(i) >= 0 && source->label(i) < source->num_classes(), "a class");
    source->read(i, bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  std::string archive(fuzz::view(data, size));
  correct_checksums(archive);
  const auto path = fuzz::write_file("train.tar", archive);
  (void)fuzz::accepts([&] { read_index(path); });
  (void)fuzz::accepts([&] { read_samples(); });
  return 0;
}
