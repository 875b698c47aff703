// SPDX-License-Identifier: Apache-2.0
#include "data/image_resample.hpp"

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace ddp::detail {

namespace {

// The taps of a whole axis.
template <typename Weight>
struct AxisTaps {
  std::vector<int> first;
  std::vector<int> count;
  std::vector<Weight> weight;  // [size, stride]
  int stride = 0;
};

// Sums of floats, not rounded.
struct FloatSums {
  using Weight = float;
  using Sum = float;
  using Value = float;
  static constexpr Sum kStart = 0;
  static Value finish(Sum sum) { return sum; }
};

// Sums of bytes with weights of 22 fractional bits, rounded to bytes.
struct ByteSums {
  using Weight = int32_t;
  using Sum = int32_t;
  using Value = uint8_t;
  static constexpr int kBits = 22;
  static constexpr Sum kStart = 1 << (kBits - 1);
  static Value finish(Sum sum) { return static_cast<Value>(std::min(sum >> kBits, 255)); }
};

void write_weights(const Taps& taps, int32_t* out) {
  thread_local std::vector<double> weight;
  weight.resize(static_cast<size_t>(taps.count));
  write_weights(taps, weight.data());
  for (size_t k = 0; k < weight.size(); ++k) {
    out[k] = static_cast<int32_t>(0.5 + weight[k] * (1 << ByteSums::kBits));
  }
}

template <typename Weight>
void make_taps(const ResampleAxis& axis, AxisTaps<Weight>& all) {
  const auto size = static_cast<size_t>(axis.size);
  all.stride = max_taps(axis);
  all.first.resize(size);
  all.count.resize(size);
  all.weight.resize(size * static_cast<size_t>(all.stride));
  for (size_t i = 0; i < size; ++i) {
    const Taps taps = find_taps(axis, static_cast<int>(i));
    all.first[i] = taps.first;
    all.count[i] = taps.count;
    write_weights(taps, &all.weight[i * static_cast<size_t>(all.stride)]);
  }
}

// `row` begins at column `x` of the image.
template <typename Sums>
void resample_row(const uint8_t* row, int x, const AxisTaps<typename Sums::Weight>& taps, int size,
                  typename Sums::Value* out) {
  for (int i = 0; i < size; ++i) {
    const auto at = static_cast<size_t>(i);
    const uint8_t* in = row + static_cast<ptrdiff_t>(taps.first[at] - x) * 3;
    const auto* weight = &taps.weight[at * static_cast<size_t>(taps.stride)];
    typename Sums::Sum r = Sums::kStart, g = Sums::kStart, b = Sums::kStart;
    for (int k = 0; k < taps.count[at]; ++k, in += 3) {
      r += weight[k] * in[0];
      g += weight[k] * in[1];
      b += weight[k] * in[2];
    }
    out[3 * i] = Sums::finish(r);
    out[3 * i + 1] = Sums::finish(g);
    out[3 * i + 2] = Sums::finish(b);
  }
}

template <typename Sums>
void resample_as(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
                 typename Sums::Value* out) {
  // Kept per thread: 224 px need about 600 KB per sample.
  thread_local AxisTaps<typename Sums::Weight> column_taps, row_taps;
  thread_local std::vector<typename Sums::Value> narrow;
  thread_local std::vector<typename Sums::Sum> sums;
  make_taps(columns, column_taps);
  make_taps(rows, row_taps);
  const int top = row_taps.first.front();
  const int bottom = row_taps.first.back() + row_taps.count.back();
  const size_t row_length = static_cast<size_t>(columns.size) * 3;
  narrow.resize(row_length * static_cast<size_t>(bottom - top));
  for (int y = top; y < bottom; ++y) {
    const uint8_t* row = image.pixels + static_cast<ptrdiff_t>(y - image.y) * image.width * 3;
    resample_row<Sums>(row, image.x, column_taps, columns.size,
                       &narrow[row_length * static_cast<size_t>(y - top)]);
  }
  for (size_t y = 0; y < static_cast<size_t>(rows.size); ++y) {
    typename Sums::Value* target = out + row_length * y;
    typename Sums::Sum* sum;
    if constexpr (std::is_same_v<typename Sums::Sum, typename Sums::Value>) {
      sum = target;
    } else {
      sums.resize(row_length);
      sum = sums.data();
    }
    std::fill_n(sum, row_length, Sums::kStart);
    for (int k = 0; k < row_taps.count[y]; ++k) {
      const auto weight =
          row_taps.weight[y * static_cast<size_t>(row_taps.stride) + static_cast<size_t>(k)];
      const auto* in = &narrow[row_length * static_cast<size_t>(row_taps.first[y] + k - top)];
      for (size_t i = 0; i < row_length; ++i) {
        sum[i] += weight * in[i];
      }
    }
    if constexpr (!std::is_same_v<typename Sums::Sum, typename Sums::Value>) {
      std::transform(sum, sum + row_length, target, &Sums::finish);
    }
  }
}

}  // namespace

void resample(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
              std::vector<float>& out) {
  out.resize(static_cast<size_t>(columns.size) * static_cast<size_t>(rows.size) * 3);
  resample_as<FloatSums>(image, columns, rows, out.data());
}

void resample_bytes(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
                    uint8_t* out) {
  resample_as<ByteSums>(image, columns, rows, out);
}

}  // namespace ddp::detail
