// SPDX-License-Identifier: Apache-2.0
// A JPEG image: the scan of its markers for nvJPEG, whole images and regions.
#include "data/images/jpeg.hpp"
#include "data/images/nvjpeg/jpeg_scan.hpp"
#include "fuzz/image_case.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  (void)ddp::detail::is_plain_baseline({data, size});
  const std::vector<uint8_t> bytes(data, data + size);
  if (size < 4 || data[0] != 0xff || data[1] != 0xd8) {
    return 0;
  }
  for (const int denominator : {1, 2, 4, 8}) {
    (void)fuzz::accepts([&] {
      ddp::detail::read_jpeg_header(bytes, fuzz::kSource, fuzz::kMaxPixels);
      ddp::detail::RgbImage whole;
      ddp::detail::decode_jpeg(bytes, fuzz::kSource, denominator, whole);
      fuzz::compare_region(bytes, denominator, whole);
    });
  }
  fuzz::decode_region_alone(bytes);
  return 0;
}
