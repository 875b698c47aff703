// SPDX-License-Identifier: Apache-2.0
#include "data/images/jpeg.hpp"

#include <turbojpeg.h>

#include "data/images/image_formats.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {

namespace {

// A decoder of one image. It keeps the tables that it reads, so a second image without tables of
// its own would be decoded with the first one's. A new decoder costs less than 1 us.
class Decoder {
 public:
  Decoder() : handle_(tjInitDecompress()) {
    DDP_CHECK(handle_ != nullptr, "libjpeg-turbo cannot create a decoder");
  }
  ~Decoder() { tjDestroy(handle_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  tjhandle handle() const { return handle_; }
  [[noreturn]] void fail(const DataSource& source, size_t num_bytes) const {
    fail_image("JPEG", source, num_bytes, tjGetErrorStr2(handle_));
  }

 private:
  tjhandle handle_;
};

// Reads the header through turbojpeg, or returns false. turbojpeg reports an error for unnamed
// sampling factors (4:1:0, some CMYK files), but still sets the other values and decodes such
// files.
bool read_header(tjhandle handle, const std::vector<uint8_t>& bytes, ImageHeader& size,
                 int& colorspace) {
  int subsampling = 0;
  colorspace = TJCS_RGB;  // turbojpeg 3 does not set it after such an error
  const int status = tjDecompressHeader3(handle, bytes.data(), bytes.size(), &size.width,
                                         &size.height, &subsampling, &colorspace);
  return status == 0 || (subsampling < 0 && colorspace >= 0);
}

bool is_jpeg(const std::vector<uint8_t>& bytes) {
  return bytes.size() >= 4 && bytes[0] == 0xff && bytes[1] == 0xd8;
}

// Adobe's CMYK files hold inverted ink, so RGB is C * K / 255.
void cmyk_to_rgb(const std::vector<uint8_t>& cmyk, std::vector<uint8_t>& rgb) {
  for (size_t i = 0; i < cmyk.size() / 4; ++i) {
    for (size_t c = 0; c < 3; ++c) {
      rgb[3 * i + c] = static_cast<uint8_t>((cmyk[4 * i + c] * cmyk[4 * i + 3] + 127) / 255);
    }
  }
}

}  // namespace

ImageHeader read_jpeg_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels) {
  ImageHeader size;
  int colorspace = 0;
  const Decoder decoder;
  if (!read_header(decoder.handle(), bytes, size, colorspace)) {
    decoder.fail(source, bytes.size());
  }
  check_pixels("JPEG", source, bytes.size(), size.width, size.height, max_pixels);
  return size;
}

void decode_jpeg(const std::vector<uint8_t>& bytes, const DataSource& source, int denominator,
                 RgbImage& out) {
  const Decoder decoder;
  ImageHeader size;
  int colorspace = 0;
  int status = -1;
  if (read_header(decoder.handle(), bytes, size, colorspace)) {
    const tjscalingfactor factor{1, denominator};
    out.width = TJSCALED(size.width, factor);
    out.height = TJSCALED(size.height, factor);
    const size_t num_pixels = static_cast<size_t>(out.width) * static_cast<size_t>(out.height);
    out.pixels.resize(num_pixels * 3);
    const bool cmyk = colorspace == TJCS_CMYK || colorspace == TJCS_YCCK;
    std::vector<uint8_t> ink(cmyk ? num_pixels * 4 : 0);
    status = tjDecompress2(decoder.handle(), bytes.data(), bytes.size(),
                           cmyk ? ink.data() : out.pixels.data(), out.width, 0, out.height,
                           cmyk ? TJPF_CMYK : TJPF_RGB, TJFLAG_STOPONWARNING);
    if (status == 0 && cmyk) {
      cmyk_to_rgb(ink, out.pixels);
    }
  }
  if (status != 0) {
    decoder.fail(source, bytes.size());
  }
}

constinit const ImageFormat kJpegFormat = {
    .name = "JPEG",
    .first_bytes = "ff d8",
    .largest_denominator = 8,
    .has_extension =
        [](std::string_view extension) { return extension == "jpg" || extension == "jpeg"; },
    .recognises = is_jpeg,
    .read_header = read_jpeg_header,
    .decode_region = decode_jpeg_region};

}  // namespace ddp::detail
