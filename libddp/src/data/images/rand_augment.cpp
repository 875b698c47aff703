// SPDX-License-Identifier: Apache-2.0
// Each operation follows Pillow's arithmetic (src/libImaging, ImageOps, ImageEnhance), so that
// every byte is equal. The compiler must not fuse products and sums here (CMakeLists.txt).
#include "data/images/rand_augment.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace ddp::detail {

namespace {

size_t bytes_of_square(int side) {
  return static_cast<size_t>(side) * static_cast<size_t>(side) * 3;
}

// Kept per thread: 150 KB at 224 px.
const std::vector<uint8_t>& copy_of(const uint8_t* pixels, int side) {
  thread_local std::vector<uint8_t> copy;
  copy.assign(pixels, pixels + bytes_of_square(side));
  return copy;
}

// Pillow's Image.convert("L").
int grey_of(const uint8_t* pixel) {
  return (19595 * pixel[0] + 38470 * pixel[1] + 7471 * pixel[2] + (1 << 15)) >> 16;
}

// Pillow's Image.blend: `from` at factor 0, `to` at factor 1.
uint8_t blend(int from, int to, float factor) {
  const float value = static_cast<float>(from) + factor * static_cast<float>(to - from);
  return static_cast<uint8_t>(std::clamp(value, 0.0f, 255.0f));
}

// torch.linspace(start, end, kNumMagnitudes)[bin]: float, counted from the nearer end. PyTorch's
// kernels for AVX2 and AVX-512 fuse the product and the sum.
double linspace(float start, float end, int bin) {
  const float step = (end - start) / (kNumMagnitudes - 1);
  return bin < kNumMagnitudes / 2
             ? std::fma(step, static_cast<float>(bin), start)
             : std::fma(-step, static_cast<float>(kNumMagnitudes - 1 - bin), end);
}

// The output's pixel (x, y) shows the input's pixel (a x + b y + c, d x + e y + f).
struct InverseAffine {
  double a = 1, b = 0, c = 0;
  double d = 0, e = 1, f = 0;
};

// Pillow's Image.rotate(degrees), counter-clockwise around the centre.
InverseAffine rotation(double degrees, int side) {
  const double angle = -degrees * (3.14159265358979323846 / 180.0);
  const double cos = std::cos(angle), sin = std::sin(angle);
  const double centre = side / 2.0;
  return {.a = cos,
          .b = sin,
          .c = centre - cos * centre - sin * centre,
          .d = -sin,
          .e = cos,
          .f = centre + sin * centre - cos * centre};
}

// Pillow's Image.transform with nearest interpolation: 16.16 fixed point, at the pixels' centres.
void warp(const InverseAffine& map, int side, uint8_t* pixels) {
  const auto fixed = [](double value) {
    return static_cast<int64_t>(std::floor(value * 65536.0 + 0.5));
  };
  const int64_t a = fixed(map.a), b = fixed(map.b), d = fixed(map.d), e = fixed(map.e);
  int64_t row_u = fixed(map.c + map.a * 0.5 + map.b * 0.5);
  int64_t row_v = fixed(map.f + map.d * 0.5 + map.e * 0.5);
  const std::vector<uint8_t>& source = copy_of(pixels, side);
  uint8_t* out = pixels;
  for (int y = 0; y < side; ++y, row_u += b, row_v += e) {
    int64_t u = row_u, v = row_v;
    for (int x = 0; x < side; ++x, out += 3, u += a, v += d) {
      const int64_t from_x = u >> 16, from_y = v >> 16;
      if (from_x < 0 || from_x >= side || from_y < 0 || from_y >= side) {
        out[0] = out[1] = out[2] = 0;
        continue;
      }
      const uint8_t* in = source.data() + (from_y * side + from_x) * 3;
      out[0] = in[0];
      out[1] = in[1];
      out[2] = in[2];
    }
  }
}

// New values of the bytes, per channel.
using ByteTables = std::array<std::array<uint8_t, 256>, 3>;
using Histograms = std::array<std::array<int64_t, 256>, 3>;

void map_bytes(const ByteTables& tables, int side, uint8_t* pixels) {
  const uint8_t* end = pixels + bytes_of_square(side);
  for (uint8_t* pixel = pixels; pixel != end; pixel += 3) {
    pixel[0] = tables[0][pixel[0]];
    pixel[1] = tables[1][pixel[1]];
    pixel[2] = tables[2][pixel[2]];
  }
}

template <typename F>
void map_each_byte(int side, uint8_t* pixels, F&& value_of) {
  ByteTables tables;
  for (int byte = 0; byte < 256; ++byte) {
    tables[0][static_cast<size_t>(byte)] = static_cast<uint8_t>(value_of(byte));
  }
  tables[1] = tables[2] = tables[0];
  map_bytes(tables, side, pixels);
}

Histograms count_bytes(int side, const uint8_t* pixels) {
  Histograms counts{};
  const uint8_t* end = pixels + bytes_of_square(side);
  for (const uint8_t* pixel = pixels; pixel != end; pixel += 3) {
    ++counts[0][pixel[0]];
    ++counts[1][pixel[1]];
    ++counts[2][pixel[2]];
  }
  return counts;
}

void auto_contrast(int side, uint8_t* pixels) {
  const Histograms counts = count_bytes(side, pixels);
  ByteTables tables;
  for (size_t c = 0; c < 3; ++c) {
    int low = 0, high = 255;
    while (counts[c][static_cast<size_t>(low)] == 0) {
      ++low;
    }
    while (counts[c][static_cast<size_t>(high)] == 0) {
      --high;
    }
    const double scale = high > low ? 255.0 / (high - low) : 1.0;
    const double offset = high > low ? -low * scale : 0.0;
    for (size_t byte = 0; byte < 256; ++byte) {
      const double value = static_cast<double>(byte) * scale + offset;
      tables[c][byte] = static_cast<uint8_t>(std::clamp(value, 0.0, 255.0));
    }
  }
  map_bytes(tables, side, pixels);
}

void equalize(int side, uint8_t* pixels) {
  const Histograms counts = count_bytes(side, pixels);
  const int64_t num_pixels = int64_t{side} * side;
  ByteTables tables;
  for (size_t c = 0; c < 3; ++c) {
    size_t largest = 255;
    while (counts[c][largest] == 0) {
      --largest;
    }
    const int64_t step = (num_pixels - counts[c][largest]) / 255;
    int64_t sum = step / 2;
    for (size_t byte = 0; byte < 256; ++byte) {
      const int64_t value = step == 0 ? static_cast<int64_t>(byte) : sum / step;
      tables[c][byte] = static_cast<uint8_t>(std::min<int64_t>(value, 255));
      sum += counts[c][byte];
    }
  }
  map_bytes(tables, side, pixels);
}

void change_color(float factor, int side, uint8_t* pixels) {
  const uint8_t* end = pixels + bytes_of_square(side);
  for (uint8_t* pixel = pixels; pixel != end; pixel += 3) {
    const int grey = grey_of(pixel);
    pixel[0] = blend(grey, pixel[0], factor);
    pixel[1] = blend(grey, pixel[1], factor);
    pixel[2] = blend(grey, pixel[2], factor);
  }
}

void change_contrast(float factor, int side, uint8_t* pixels) {
  int64_t sum = 0;
  const uint8_t* end = pixels + bytes_of_square(side);
  for (const uint8_t* pixel = pixels; pixel != end; pixel += 3) {
    sum += grey_of(pixel);
  }
  const double mean = static_cast<double>(sum) / (static_cast<double>(side) * side);
  const int grey = static_cast<int>(mean + 0.5);
  map_each_byte(side, pixels, [&](int byte) { return blend(grey, byte, factor); });
}

// Blends with Pillow's ImageFilter.SMOOTH: weights 1, and 5 at the centre, of 13. The pixels at the
// border are not smoothed.
void change_sharpness(float factor, int side, uint8_t* pixels) {
  const std::vector<uint8_t>& source = copy_of(pixels, side);
  const ptrdiff_t row = static_cast<ptrdiff_t>(side) * 3;
  for (ptrdiff_t y = 1; y < side - 1; ++y) {
    const uint8_t* in = source.data() + y * row;
    uint8_t* out = pixels + y * row;
    for (ptrdiff_t i = 3; i < row - 3; ++i) {
      const uint8_t* above = in + i - row;
      const uint8_t* below = in + i + row;
      const int sum = above[-3] + above[0] + above[3] + in[i - 3] + 5 * in[i] + in[i + 3] +
                      below[-3] + below[0] + below[3];
      out[i] = blend((2 * sum + 13) / 26, in[i], factor);  // sum / 13, rounded
    }
  }
}

}  // namespace

bool has_sign(AugmentOp op) {
  return op >= AugmentOp::ShearX && op <= AugmentOp::Sharpness;
}

double magnitude_of(AugmentOp op, int bin, int side) {
  switch (op) {
    case AugmentOp::ShearX:
    case AugmentOp::ShearY:
      return linspace(0.0f, 0.3f, bin);
    case AugmentOp::TranslateX:
    case AugmentOp::TranslateY:
      return linspace(0.0f, static_cast<float>(150.0 / 331.0 * side), bin);
    case AugmentOp::Rotate:
      return linspace(0.0f, 30.0f, bin);
    case AugmentOp::Brightness:
    case AugmentOp::Color:
    case AugmentOp::Contrast:
    case AugmentOp::Sharpness:
      return linspace(0.0f, 0.9f, bin);
    case AugmentOp::Posterize:
      return std::round(8.0 - bin / ((kNumMagnitudes - 1) / 4.0));
    case AugmentOp::Solarize:
      return linspace(1.0f, 0.0f, bin);
    default:
      return 0.0;
  }
}

std::vector<AugmentStep> draw_rand_augment(SampleRng& rng, int num_ops, int bin, int side) {
  std::vector<AugmentStep> steps(static_cast<size_t>(num_ops));
  for (AugmentStep& step : steps) {
    step.op = static_cast<AugmentOp>(rng.below(kNumAugmentOps));
    step.magnitude = magnitude_of(step.op, bin, side);
    if (rng.coin() && has_sign(step.op)) {
      step.magnitude = -step.magnitude;
    }
  }
  return steps;
}

void apply_augment_step(const AugmentStep& step, int side, uint8_t* pixels) {
  const double magnitude = step.magnitude;
  const auto factor = static_cast<float>(1.0 + magnitude);
  switch (step.op) {
    case AugmentOp::Identity:
      return;
    case AugmentOp::ShearX:
      return warp({.b = magnitude}, side, pixels);
    case AugmentOp::ShearY:
      return warp({.d = magnitude}, side, pixels);
    case AugmentOp::TranslateX:
      return warp({.c = -std::trunc(magnitude)}, side, pixels);
    case AugmentOp::TranslateY:
      return warp({.f = -std::trunc(magnitude)}, side, pixels);
    case AugmentOp::Rotate:
      return warp(rotation(magnitude, side), side, pixels);
    case AugmentOp::Brightness:
      return map_each_byte(side, pixels, [&](int byte) { return blend(0, byte, factor); });
    case AugmentOp::Color:
      return change_color(factor, side, pixels);
    case AugmentOp::Contrast:
      return change_contrast(factor, side, pixels);
    case AugmentOp::Sharpness:
      return change_sharpness(factor, side, pixels);
    case AugmentOp::Posterize:
      return map_each_byte(side, pixels, [bits = static_cast<int>(magnitude)](int byte) {
        return byte & ~((1 << (8 - bits)) - 1);
      });
    case AugmentOp::Solarize:
      return map_each_byte(side, pixels, [threshold = 255.0 * magnitude](int byte) {
        return byte < threshold ? byte : 255 - byte;
      });
    case AugmentOp::AutoContrast:
      return auto_contrast(side, pixels);
    case AugmentOp::Equalize:
      return equalize(side, pixels);
  }
}

}  // namespace ddp::detail
