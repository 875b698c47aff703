// SPDX-License-Identifier: Apache-2.0
// The input pixels and weights of each output pixel of a resized region: the triangle filter
// widened by the scale, as Pillow's BILINEAR (Resample.c). Host and device get the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "data/images/augmentation.hpp"

namespace ddp::detail {

/// One axis: [begin, begin + length) of an image with `limit` pixels is resized to `outputs`
/// pixels, of which `size` are computed, starting at `first`. Pixels outside the box are ignored.
struct ResampleAxis {
  double begin = 0;
  double length = 0;
  int limit = 0;
  int64_t outputs = 0;
  int64_t first = 0;
  int size = static_cast<int>(outputs);
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

/// First and last pixel (exclusive) of the box.
DDP_HOST_DEVICE inline int axis_low(const ResampleAxis& axis) {
  const int low = static_cast<int>(floor(axis.begin));
  return low < 0 ? 0 : low;
}
DDP_HOST_DEVICE inline int axis_high(const ResampleAxis& axis) {
  const int high = static_cast<int>(ceil(add(axis.begin, axis.length)));
  return high > axis.limit ? axis.limit : high;
}

DDP_HOST_DEVICE inline double axis_radius(const ResampleAxis& axis) {
  const double scale = axis.length / static_cast<double>(axis.outputs);
  return scale < 1.0 ? 1.0 : scale;
}

/// Maximum number of taps of an output pixel.
DDP_HOST_DEVICE inline int max_taps(const ResampleAxis& axis) {
  return static_cast<int>(ceil(axis_radius(axis))) * 2 + 1;
}

/// Taps of computed output pixel `place`.
DDP_HOST_DEVICE inline Taps find_taps(const ResampleAxis& axis, int place) {
  const int low = axis_low(axis), high = axis_high(axis);
  Taps taps;
  taps.radius = axis_radius(axis);
  const double scale = axis.length / static_cast<double>(axis.outputs);
  taps.centre = add(axis.begin, mul(static_cast<double>(axis.first + place) + 0.5, scale));
  const int first = static_cast<int>(floor(add(taps.centre - taps.radius, 0.5)));
  taps.first = first < low ? low : first;
  taps.first = taps.first > high - 1 ? high - 1 : taps.first;
  const int end = clamp_int(static_cast<int>(floor(add(add(taps.centre, taps.radius), 0.5))),
                            taps.first + 1, high);
  const int most = max_taps(axis);
  taps.count = end - taps.first < most ? end - taps.first : most;
  return taps;
}

/// First and last pixel (exclusive) used by any output pixel.
DDP_HOST_DEVICE inline int first_used(const ResampleAxis& axis) {
  return find_taps(axis, 0).first;
}
DDP_HOST_DEVICE inline int end_used(const ResampleAxis& axis) {
  const Taps last = find_taps(axis, axis.size - 1);
  return last.first + last.count;
}

DDP_HOST_DEVICE inline double triangle(const Taps& taps, int k) {
  const double at = add(add(taps.first + k, 0.5), -taps.centre) / taps.radius;
  const double weight = add(1.0, -(at < 0 ? -at : at));
  return weight < 0.0 ? 0.0 : weight;
}

/// Writes the `taps.count` weights, whose sum is 1, as float or double.
template <typename Weight>
DDP_HOST_DEVICE inline void write_weights(const Taps& taps, Weight* weight) {
  double sum = 0;
  for (int k = 0; k < taps.count; ++k) {
    sum = add(sum, triangle(taps, k));
  }
  for (int k = 0; k < taps.count; ++k) {
    weight[k] = static_cast<Weight>(sum > 0 ? triangle(taps, k) / sum : (k == 0 ? 1.0 : 0.0));
  }
}

}  // namespace ddp::detail
