// SPDX-License-Identifier: Apache-2.0
// A PNG image. Checksums of chunks are corrected, so that damaged chunks reach the decoder.
#include <zlib.h>

#include "data/sources/data_file.hpp"
#include "fuzz/image_case.hpp"

namespace {

void correct_checksums(std::vector<uint8_t>& bytes) {
  std::size_t at = 8;
  while (at + 12 <= bytes.size()) {
    const auto length = static_cast<std::size_t>(ddp::detail::big_endian_32(bytes.data() + at));
    if (length > bytes.size() - at - 12) {
      return;
    }
    const auto checksum =
        ::crc32(::crc32(0, nullptr, 0), bytes.data() + at + 4, static_cast<uInt>(length + 4));
    for (std::size_t i = 0; i < 4; ++i) {
      bytes[at + 8 + length + i] = static_cast<uint8_t>(checksum >> (24 - 8 * i));
    }
    at += length + 12;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  fuzz::decode_region_alone(bytes);
  correct_checksums(bytes);
  fuzz::decode_region_alone(bytes);
  return 0;
}
