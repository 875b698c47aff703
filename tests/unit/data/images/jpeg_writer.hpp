// SPDX-License-Identifier: Apache-2.0
// Creates JPEG images in memory: smooth shapes with edges and some noise, so that misplaced pixels
// are detected.
#pragma once

#include <turbojpeg.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddp/data/sample_rng.hpp"

namespace data_test {

/// `subsampling`: TJSAMP_444, TJSAMP_422, TJSAMP_420 or TJSAMP_GRAY.
inline std::string make_jpeg(int width, int height, int subsampling = TJSAMP_420, uint64_t seed = 0,
                             int quality = 85, int flags = 0) {
  ddp::SampleRng rng(seed, 0, 0);
  std::vector<uint8_t> pixels(static_cast<size_t>(width) * static_cast<size_t>(height) * 3);
  const double fx = 3.0 + rng.below(20), fy = 3.0 + rng.below(20);
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < 3; ++c) {
        const double wave = std::sin(x / fx + c) * std::cos(y / fy - c);
        const double edge = (x / 17 + y / 23 + c) % 2 == 0 ? 40 : -40;
        const double value = 128 + 60 * wave + edge + rng.below(25);
        pixels[(static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)) * 3 +
               static_cast<size_t>(c)] = static_cast<uint8_t>(std::fmin(std::fmax(value, 0), 255));
      }
    }
  }
  tjhandle handle = tjInitCompress();
  unsigned char* out = nullptr;
  unsigned long size = 0;
  const int status = tjCompress2(handle, pixels.data(), width, 0, height, TJPF_RGB, &out, &size,
                                 subsampling, quality, flags);
  std::string bytes(reinterpret_cast<char*>(out), status == 0 ? size : 0);
  tjFree(out);
  tjDestroy(handle);
  if (status != 0) {
    throw std::runtime_error("tjCompress2 failed");
  }
  return bytes;
}

}  // namespace data_test
