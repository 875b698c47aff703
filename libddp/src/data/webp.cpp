// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>

#include "data/other_images.hpp"
#include "ddp/core/error.hpp"

#ifdef DDP_HAS_WEBP
#include <webp/decode.h>
#endif

namespace ddp::detail {

bool is_webp(const std::vector<uint8_t>& bytes) {
  return bytes.size() >= 12 && std::memcmp(bytes.data(), "RIFF", 4) == 0 &&
         std::memcmp(bytes.data() + 8, "WEBP", 4) == 0;
}

#ifdef DDP_HAS_WEBP
namespace {

[[noreturn]] void fail_webp(const DataSource& source, size_t num_bytes, const std::string& why) {
  throw CorruptImage(
      concat(source.to_string(), ": corrupt or truncated WebP of ", num_bytes, " bytes: ", why));
}

}  // namespace

ImageHeader read_webp_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels) {
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(bytes.data(), bytes.size(), &features) != VP8_STATUS_OK) {
    fail_webp(source, bytes.size(), "it has no header");
  }
  if (features.has_animation != 0) {
    throw CorruptImage(concat(source.to_string(),
                              ": an animated WebP, of which no frame is decoded; convert its first "
                              "frame to a still image"));
  }
  const ImageHeader size{features.width, features.height};
  if (int64_t{size.width} * size.height > max_pixels) {
    throw CorruptImage(concat(source.to_string(), ": WebP of ", size.width, " x ", size.height,
                              " pixels; data.max_pixels allows ", max_pixels));
  }
  return size;
}

void decode_webp_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        const CropBox& region, uint8_t* out) {
  thread_local std::vector<uint8_t> pixels;
  const ImageHeader size = read_webp_header(bytes, source, INT64_MAX);
  const size_t row_bytes = static_cast<size_t>(size.width) * 3;
  pixels.resize(row_bytes * static_cast<size_t>(size.height));
  if (WebPDecodeRGBInto(bytes.data(), bytes.size(), pixels.data(), pixels.size(),
                        static_cast<int>(row_bytes)) == nullptr) {
    fail_webp(source, bytes.size(), "libwebp cannot decode it");
  }
  copy_region({pixels.data(), size.width, size.height}, region, out);
}

#else

ImageHeader read_webp_header(const std::vector<uint8_t>&, const DataSource& source, int64_t) {
  throw SettingsError(concat(source.to_string(),
                             ": a WebP image, but libddp was built without libwebp; fix: install "
                             "libwebp-dev and build again, or convert the image to JPEG or PNG"));
}

void decode_webp_region(const std::vector<uint8_t>& bytes, const DataSource& source, const CropBox&,
                        uint8_t*) {
  (void)read_webp_header(bytes, source, 0);
}

#endif

}  // namespace ddp::detail
