// SPDX-License-Identifier: Apache-2.0
#include "data/image_transform.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ddp::detail {

namespace {

// The taps of a whole axis.
struct AxisTaps {
  std::vector<int> first;
  std::vector<int> count;
  std::vector<float> weight;  // [size, stride]
  int stride = 0;
};

void make_taps(const ResampleAxis& axis, AxisTaps& all) {
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
void resample_row(const uint8_t* row, int x, const AxisTaps& taps, int size, float* out) {
  for (int i = 0; i < size; ++i) {
    const auto at = static_cast<size_t>(i);
    const uint8_t* in = row + static_cast<ptrdiff_t>(taps.first[at] - x) * 3;
    const float* weight = &taps.weight[at * static_cast<size_t>(taps.stride)];
    float r = 0, g = 0, b = 0;
    for (int k = 0; k < taps.count[at]; ++k, in += 3) {
      r += weight[k] * in[0];
      g += weight[k] * in[1];
      b += weight[k] * in[2];
    }
    out[3 * i] = r;
    out[3 * i + 1] = g;
    out[3 * i + 2] = b;
  }
}

// The smallest decoding (1/8, 1/4, 1/2 of the size, done inside the inverse DCT) that still has
// `size` pixels across `box`.
int choose_denominator(const CropBox& box, int size) {
  const int shorter = std::min(box.width, box.height);
  for (int denominator : {8, 4, 2}) {
    if (shorter / denominator >= size) {
      return denominator;
    }
  }
  return 1;
}

}  // namespace

void resample(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
              std::vector<float>& out) {
  // Kept a thread: 224 px need some 600 KB a sample.
  thread_local AxisTaps column_taps, row_taps;
  thread_local std::vector<float> narrow;
  make_taps(columns, column_taps);
  make_taps(rows, row_taps);
  const int top = row_taps.first.front();
  const int bottom = row_taps.first.back() + row_taps.count.back();
  const size_t row_length = static_cast<size_t>(columns.size) * 3;
  narrow.resize(row_length * static_cast<size_t>(bottom - top));
  for (int y = top; y < bottom; ++y) {
    const uint8_t* row = image.pixels + static_cast<ptrdiff_t>(y - image.y) * image.width * 3;
    resample_row(row, image.x, column_taps, columns.size,
                 &narrow[row_length * static_cast<size_t>(y - top)]);
  }
  const auto num_rows = static_cast<size_t>(rows.size);
  out.assign(row_length * num_rows, 0.0f);
  for (size_t y = 0; y < num_rows; ++y) {
    float* target = &out[row_length * y];
    for (int k = 0; k < row_taps.count[y]; ++k) {
      const float weight =
          row_taps.weight[y * static_cast<size_t>(row_taps.stride) + static_cast<size_t>(k)];
      const float* in = &narrow[row_length * static_cast<size_t>(row_taps.first[y] + k - top)];
      for (size_t i = 0; i < row_length; ++i) {
        target[i] += weight * in[i];
      }
    }
  }
}

ImageTransform::ImageTransform(const DataOptions& options, bool train)
    : mode_(train ? options.augment : Augment::None),
      size_(static_cast<int>(options.image_size)),
      eval_resize_(static_cast<int>(options.eval_resize)),
      seed_(static_cast<uint64_t>(options.seed)),
      pad_(static_cast<int>(options.pad)),
      flip_(options.flip),
      cutout_(static_cast<int>(options.cutout)),
      channels_last_(options.channels_last) {
  bounds_ = {options.min_scale,           options.max_scale, std::log(options.min_ratio),
             std::log(options.max_ratio), options.min_ratio, options.max_ratio};
  for (size_t c = 0; c < 3; ++c) {
    const auto mean = static_cast<float>(options.mean[c]);
    const auto std = static_cast<float>(options.std[c]);
    mean_[c] = mean;
    std_[c] = std;
    for (size_t v = 0; v < 256; ++v) {
      table_[c][v] = normalise_byte(static_cast<uint8_t>(v), mean, std);
    }
    scale_[c] = 1.0f / (255.0f * std);
    shift_[c] = -mean / std;
  }
}

std::optional<SmallImageTransform> ImageTransform::small_image_transform() const {
  const CropBox box = source_box(size_, size_, 0, 0);
  if (mode_ == Augment::RandomResizedCrop || (mode_ == Augment::None && box.width != size_)) {
    return std::nullopt;
  }
  return SmallImageTransform{.side = size_,
                             .random = mode_ == Augment::PadCrop,
                             .flip = flip_,
                             .pad = pad_,
                             .cutout = cutout_,
                             .seed = seed_,
                             .mean = {mean_[0], mean_[1], mean_[2]},
                             .std = {std_[0], std_[1], std_[2]}};
}

RandomResizedCrop ImageTransform::draw(int width, int height, uint64_t epoch,
                                       uint64_t index) const {
  SampleRng rng(seed_, epoch, index);
  return draw_random_resized_crop(rng, width, height, size_, bounds_);
}

CropBox ImageTransform::source_box(int width, int height, uint64_t epoch, uint64_t index) const {
  if (mode_ == Augment::RandomResizedCrop) {
    return draw(width, height, epoch, index).box;
  }
  // Resizing the shorter side to eval_resize and cutting size x size from the centre is the same as
  // resizing this centre box.
  const int shorter = std::min(width, height);
  const int side = std::max(
      1, static_cast<int>(std::lround(static_cast<double>(shorter) * size_ / eval_resize_)));
  const int fits = std::min(side, shorter);
  return {(width - fits) / 2, (height - fits) / 2, fits, fits};
}

RegionPlan ImageTransform::plan(int width, int height, uint64_t epoch, uint64_t index) const {
  const CropBox box = source_box(width, height, epoch, index);
  return plan_at(choose_denominator(box, size_), width, height, epoch, index);
}

RegionPlan ImageTransform::plan_at(int denominator, int width, int height, uint64_t epoch,
                                   uint64_t index) const {
  const bool random = mode_ == Augment::RandomResizedCrop;
  const CropBox box = source_box(width, height, epoch, index);
  RegionPlan plan;
  plan.denominator = denominator;
  plan.whole_width = (width + denominator - 1) / denominator;
  plan.whole_height = (height + denominator - 1) / denominator;
  plan.as_it_is = !random && box.width == size_ && box.height == size_ &&
                  plan.whole_width == size_ && plan.whole_height == size_;
  const double shrink_x = static_cast<double>(plan.whole_width) / width;
  const double shrink_y = static_cast<double>(plan.whole_height) / height;
  plan.box = {box.x * shrink_x, box.y * shrink_y, box.width * shrink_x, box.height * shrink_y};
  const ResampleAxis columns{plan.box.x, plan.box.width, plan.whole_width, size_};
  const ResampleAxis rows{plan.box.y, plan.box.height, plan.whole_height, size_};
  plan.region = {axis_low(columns), axis_low(rows), axis_high(columns) - axis_low(columns),
                 axis_high(rows) - axis_low(rows)};
  if (random) {
    const RandomResizedCrop crop = draw(width, height, epoch, index);
    plan.flip = flip_ && crop.flip;
    plan.cutout = cutout_ > 0;
    plan.cutout_x = crop.cutout_x;
    plan.cutout_y = crop.cutout_y;
  }
  return plan;
}

void ImageTransform::apply(const ImageView& image, uint64_t epoch, uint64_t index,
                           float* out) const {
  if (mode_ == Augment::PadCrop) {
    pad_crop(image, epoch, index, out);
  } else {
    apply(image, plan_at(1, image.width, image.height, epoch, index), out);
  }
}

void ImageTransform::apply(const ImageView& image, const RegionPlan& plan, float* out) const {
  if (plan.as_it_is) {
    copy_same_size(image, out);
    return;
  }
  thread_local std::vector<float> resized;
  resample(image, {plan.box.x, plan.box.width, plan.whole_width, size_},
           {plan.box.y, plan.box.height, plan.whole_height, size_}, resized);
  normalise(resized.data(), plan.flip, out);
  if (plan.cutout) {
    cut_out(plan.cutout_x, plan.cutout_y, out);
  }
}

void ImageTransform::pad_crop(const ImageView& image, uint64_t epoch, uint64_t index,
                              float* out) const {
  SampleRng rng(seed_, epoch, index);
  const PadCrop crop = draw_pad_crop(rng, size_, pad_);
  const bool flip = flip_ && crop.flip;
  const int step = flip ? -3 : 3;
  const ptrdiff_t plane = static_cast<ptrdiff_t>(size_) * size_;
  // Output columns [first, last) show the image, before mirroring; the others are black.
  const int first = std::clamp(-crop.dx, 0, size_);
  const int last = std::clamp(size_ - crop.dx, first, size_);
  const int begin = flip ? size_ - last : first;
  const int end = flip ? size_ - first : last;
  for (int y = 0; y < size_; ++y) {
    const int from_y = y + crop.dy;
    const bool inside = from_y >= 0 && from_y < size_;
    for (int c = 0; c < 3; ++c) {
      const float* table = table_[static_cast<size_t>(c)].data();
      const ptrdiff_t stride = channels_last_ ? 3 : 1;
      float* row = channels_last_ ? out + static_cast<ptrdiff_t>(y) * size_ * 3 + c
                                  : out + c * plane + static_cast<ptrdiff_t>(y) * size_;
      const int from = inside ? begin : size_;
      const int to = inside ? end : size_;
      for (int x = 0; x < from; ++x) {
        row[x * stride] = table[0];
      }
      if (from < to) {
        const int from_x = (flip ? size_ - 1 - from : from) + crop.dx;
        const uint8_t* in =
            image.pixels + (static_cast<ptrdiff_t>(from_y) * size_ + from_x) * 3 + c;
        for (int x = from; x < to; ++x, in += step) {
          row[x * stride] = table[*in];
        }
      }
      for (int x = to; x < size_; ++x) {
        row[x * stride] = table[0];
      }
    }
  }
  cut_out(crop.cutout_x, crop.cutout_y, out);
}

void ImageTransform::copy_same_size(const ImageView& image, float* out) const {
  const ptrdiff_t plane = static_cast<ptrdiff_t>(size_) * size_;
  for (size_t c = 0; c < 3; ++c) {
    const float* table = table_[c].data();
    float* target = channels_last_ ? out + c : out + static_cast<ptrdiff_t>(c) * plane;
    const ptrdiff_t stride = channels_last_ ? 3 : 1;
    for (ptrdiff_t i = 0; i < plane; ++i) {
      target[i * stride] = table[image.pixels[3 * i + static_cast<ptrdiff_t>(c)]];
    }
  }
}

void ImageTransform::normalise(const float* pixels, bool flip, float* out) const {
  const ptrdiff_t plane = static_cast<ptrdiff_t>(size_) * size_;
  for (ptrdiff_t y = 0; y < size_; ++y) {
    for (ptrdiff_t c = 0; c < 3; ++c) {
      const float scale = scale_[static_cast<size_t>(c)], shift = shift_[static_cast<size_t>(c)];
      const ptrdiff_t stride = channels_last_ ? 3 : 1;
      float* row = channels_last_ ? out + y * size_ * 3 + c : out + c * plane + y * size_;
      const float* in = pixels + y * size_ * 3 + c + (flip ? (size_ - 1) * 3 : 0);
      const ptrdiff_t step = flip ? -3 : 3;
      for (ptrdiff_t x = 0; x < size_; ++x, in += step) {
        row[x * stride] = *in * scale + shift;
      }
    }
  }
}

void ImageTransform::cut_out(int x, int y, float* out) const {
  if (cutout_ == 0) {
    return;
  }
  const int left = std::max(x - cutout_ / 2, 0), right = std::min(x - cutout_ / 2 + cutout_, size_);
  const int top = std::max(y - cutout_ / 2, 0), bottom = std::min(y - cutout_ / 2 + cutout_, size_);
  const ptrdiff_t plane = static_cast<ptrdiff_t>(size_) * size_;
  for (ptrdiff_t row = top; row < bottom; ++row) {
    if (channels_last_) {
      std::fill(out + (row * size_ + left) * 3, out + (row * size_ + std::max(left, right)) * 3,
                0.0f);
      continue;
    }
    for (ptrdiff_t c = 0; c < 3; ++c) {
      float* line = out + c * plane + row * size_;
      std::fill(line + left, line + std::max(left, right), 0.0f);
    }
  }
}

}  // namespace ddp::detail
