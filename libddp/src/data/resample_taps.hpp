// SPDX-License-Identifier: Apache-2.0
// Which input pixels make an output pixel when a part of an image is resized, and with what
// weights: the triangle filter widened by the scale, as Pillow's BILINEAR (Resample.c). Host and
// device get the same bits.
#pragma once

#include <cmath>

#include "ddp/data/augmentation.hpp"

namespace ddp::detail {

/// One axis: [begin, begin + length) of an image with `limit` pixels becomes `size` pixels. Pixels
/// outside the box do not count.
struct ResampleAxis {
  double begin = 0;
  double length = 0;
  int limit = 0;
  int size = 0;
};

/// The pixels of one output pixel: [first, first + count).
struct Taps {
  int first = 0;
  int count = 0;
  double centre = 0;
  double radius = 1;
};

DDP_HOST_DEVICE inline int clamp_int(int value, int low, int high) {
  return value < low ? low : (value > high ? high : value);
}

/// First and last pixel (exclusive) that any output pixel uses.
DDP_HOST_DEVICE inline int axis_low(const ResampleAxis& axis) {
  const int low = static_cast<int>(floor(axis.begin));
  return low < 0 ? 0 : low;
}
DDP_HOST_DEVICE inline int axis_high(const ResampleAxis& axis) {
  const int high = static_cast<int>(ceil(add(axis.begin, axis.length)));
  return high > axis.limit ? axis.limit : high;
}

DDP_HOST_DEVICE inline double axis_radius(const ResampleAxis& axis) {
  const double scale = axis.length / axis.size;
  return scale < 1.0 ? 1.0 : scale;
}

/// Most pixels that an output pixel has.
DDP_HOST_DEVICE inline int max_taps(const ResampleAxis& axis) {
  return static_cast<int>(ceil(axis_radius(axis))) * 2 + 1;
}

DDP_HOST_DEVICE inline Taps find_taps(const ResampleAxis& axis, int place) {
  const int low = axis_low(axis), high = axis_high(axis);
  Taps taps;
  taps.radius = axis_radius(axis);
  taps.centre = add(axis.begin, mul(place + 0.5, axis.length / axis.size));
  const int first = static_cast<int>(floor(add(taps.centre - taps.radius, 0.5)));
  taps.first = first < low ? low : first;
  taps.first = taps.first > high - 1 ? high - 1 : taps.first;
  const int end = clamp_int(static_cast<int>(floor(add(add(taps.centre, taps.radius), 0.5))),
                            taps.first + 1, high);
  const int most = max_taps(axis);
  taps.count = end - taps.first < most ? end - taps.first : most;
  return taps;
}

DDP_HOST_DEVICE inline double triangle(const Taps& taps, int k) {
  const double at = add(add(taps.first + k, 0.5), -taps.centre) / taps.radius;
  const double weight = add(1.0, -(at < 0 ? -at : at));
  return weight < 0.0 ? 0.0 : weight;
}

/// Writes the `taps.count` weights, whose sum is 1.
DDP_HOST_DEVICE inline void write_weights(const Taps& taps, float* weight) {
  double sum = 0;
  for (int k = 0; k < taps.count; ++k) {
    sum = add(sum, triangle(taps, k));
  }
  for (int k = 0; k < taps.count; ++k) {
    weight[k] = sum > 0 ? static_cast<float>(triangle(taps, k) / sum) : (k == 0 ? 1.0f : 0.0f);
  }
}

}  // namespace ddp::detail
