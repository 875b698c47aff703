// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>

#include "data/images/image_formats.hpp"
#include "ddp/core/error.hpp"

#ifdef DDP_HAS_WEBP
#include <webp/decode.h>
#endif

namespace ddp::detail {

namespace {

bool is_webp(const std::vector<uint8_t>& bytes) {
  return bytes.size() >= 12 && std::memcmp(bytes.data(), "RIFF", 4) == 0 &&
         std::memcmp(bytes.data() + 8, "WEBP", 4) == 0;
}

#ifdef DDP_HAS_WEBP
ImageHeader read_webp_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels) {
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(bytes.data(), bytes.size(), &features) != VP8_STATUS_OK) {
    fail_image("WebP", source, bytes.size(), "it has no header");
  }
  if (features.has_animation != 0) {
    throw CorruptImage(concat(source.to_string(),
                              ": an animated WebP, of which no frame is decoded; convert its first "
                              "frame to a still image"));
  }
  check_pixels("WebP", source, bytes.size(), features.width, features.height, max_pixels);
  return {features.width, features.height};
}

void decode_webp_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        int /*denominator*/, const CropBox& region, uint8_t* out) {
  thread_local std::vector<uint8_t> pixels;
  const ImageHeader size = read_webp_header(bytes, source, INT64_MAX);
  const size_t row_bytes = static_cast<size_t>(size.width) * 3;
  pixels.resize(row_bytes * static_cast<size_t>(size.height));
  if (WebPDecodeRGBInto(bytes.data(), bytes.size(), pixels.data(), pixels.size(),
                        static_cast<int>(row_bytes)) == nullptr) {
    fail_image("WebP", source, bytes.size(), "libwebp cannot decode it");
  }
  copy_region({pixels.data(), size.width, size.height}, region, out);
}

#endif

}  // namespace

constinit const ImageFormat kWebpFormat = {
    .name = "WebP",
    .first_bytes = "52 49 46 46, four other bytes and 57 45 42 50",
    .has_extension = [](std::string_view extension) { return extension == "webp"; },
    .recognises = is_webp,
#ifdef DDP_HAS_WEBP
    .read_header = read_webp_header,
    .decode_region = decode_webp_region
#else
    .why_unsupported =
        ": a WebP image, but libddp was built without libwebp; fix: install libwebp-dev and build "
        "again, or convert the image to JPEG or PNG"
#endif
};

}  // namespace ddp::detail
