// SPDX-License-Identifier: Apache-2.0
#include "data/jpeg.hpp"

#include <turbojpeg.h>

#include <memory>
#include <mutex>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {

namespace {

struct HandleDeleter {
  void operator()(void* handle) const { tjDestroy(handle); }
};

using DecoderHandle = std::unique_ptr<void, HandleDeleter>;

DecoderHandle& handle_of_thread() {
  thread_local DecoderHandle handle;
  return handle;
}

// A handle is not thread safe and takes about 20 us to create, so each thread keeps one.
tjhandle decoder() {
  DecoderHandle& handle = handle_of_thread();
  if (!handle) {
    handle.reset(tjInitDecompress());
    DDP_CHECK(handle != nullptr, "libjpeg-turbo cannot create a decoder");
  }
  return handle.get();
}

// Discards the handle: after an error it misreads the next file (seen with 2.1.5).
[[noreturn]] void fail_jpeg(const DataSource& source, size_t num_bytes) {
  const std::string why = tjGetErrorStr2(decoder());
  handle_of_thread().reset();
  fail_image("JPEG", source, num_bytes, why);
}

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

// Adobe's CMYK files hold inverted ink, so RGB is C * K / 255.
void cmyk_to_rgb(const std::vector<uint8_t>& cmyk, std::vector<uint8_t>& rgb) {
  for (size_t i = 0; i < cmyk.size() / 4; ++i) {
    for (size_t c = 0; c < 3; ++c) {
      rgb[3 * i + c] = static_cast<uint8_t>((cmyk[4 * i + c] * cmyk[4 * i + 3] + 127) / 255);
    }
  }
}

}  // namespace

void warn_cpu_decodes(const std::string& reason) {
  static std::once_flag logged;
  std::call_once(logged, [&] {
    log_warning(concat("loader.jpeg_decoder=nvjpeg is not used: ", reason,
                       "; the loader's threads decode with libjpeg-turbo"));
  });
}

ImageHeader read_jpeg_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels) {
  ImageHeader size{.largest_denominator = 8};
  int colorspace = 0;
  if (!read_header(decoder(), bytes, size, colorspace)) {
    fail_jpeg(source, bytes.size());
  }
  check_pixels("JPEG", source, bytes.size(), size.width, size.height, max_pixels);
  return size;
}

void decode_jpeg(const std::vector<uint8_t>& bytes, const DataSource& source, int denominator,
                 RgbImage& out) {
  const tjhandle handle = decoder();
  ImageHeader size;
  int colorspace = 0;
  int status = -1;
  if (read_header(handle, bytes, size, colorspace)) {
    const tjscalingfactor factor{1, denominator};
    out.width = TJSCALED(size.width, factor);
    out.height = TJSCALED(size.height, factor);
    const size_t num_pixels = static_cast<size_t>(out.width) * static_cast<size_t>(out.height);
    out.pixels.resize(num_pixels * 3);
    const bool cmyk = colorspace == TJCS_CMYK || colorspace == TJCS_YCCK;
    std::vector<uint8_t> ink(cmyk ? num_pixels * 4 : 0);
    status =
        tjDecompress2(handle, bytes.data(), bytes.size(), cmyk ? ink.data() : out.pixels.data(),
                      out.width, 0, out.height, cmyk ? TJPF_CMYK : TJPF_RGB, TJFLAG_STOPONWARNING);
    if (status == 0 && cmyk) {
      cmyk_to_rgb(ink, out.pixels);
    }
  }
  if (status != 0) {
    fail_jpeg(source, bytes.size());
  }
}

}  // namespace ddp::detail
