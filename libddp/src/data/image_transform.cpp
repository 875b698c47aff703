// SPDX-License-Identifier: Apache-2.0
#include "data/image_transform.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ddp::detail {

namespace {

// For each output place the first input place and its weights.
struct Taps {
  std::vector<int> first;
  std::vector<int> count;
  std::vector<float> weight;  // [size, stride]
  int stride = 0;
};

void make_taps(double begin, double length, int limit, int size, Taps& taps) {
  const double scale = length / size;
  const double radius = std::max(scale, 1.0);
  const int low = std::max(static_cast<int>(std::floor(begin)), 0);
  const int high = std::min(static_cast<int>(std::ceil(begin + length)), limit);
  taps.stride = static_cast<int>(std::ceil(radius)) * 2 + 1;
  taps.first.resize(static_cast<size_t>(size));
  taps.count.resize(static_cast<size_t>(size));
  taps.weight.assign(static_cast<size_t>(size) * static_cast<size_t>(taps.stride), 0.0f);
  for (int i = 0; i < size; ++i) {
    const double centre = begin + (i + 0.5) * scale;
    int first = std::max(static_cast<int>(std::floor(centre - radius + 0.5)), low);
    first = std::min(first, high - 1);
    const int end =
        std::clamp(static_cast<int>(std::floor(centre + radius + 0.5)), first + 1, high);
    const int count = std::min(end - first, taps.stride);
    float* weight = &taps.weight[static_cast<size_t>(i) * static_cast<size_t>(taps.stride)];
    double sum = 0;
    for (int k = 0; k < count; ++k) {
      sum += std::max(1.0 - std::abs((first + k + 0.5 - centre) / radius), 0.0);
    }
    for (int k = 0; k < count; ++k) {
      const double w = std::max(1.0 - std::abs((first + k + 0.5 - centre) / radius), 0.0);
      weight[k] = static_cast<float>(sum > 0 ? w / sum : (k == 0 ? 1.0 : 0.0));
    }
    taps.first[static_cast<size_t>(i)] = first;
    taps.count[static_cast<size_t>(i)] = count;
  }
}

void resample_row(const uint8_t* row, const Taps& taps, int size, float* out) {
  for (int i = 0; i < size; ++i) {
    const auto at = static_cast<size_t>(i);
    const uint8_t* in = row + static_cast<ptrdiff_t>(taps.first[at]) * 3;
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

}  // namespace

void resample(const ImageView& image, const RealBox& box, int size, std::vector<float>& out) {
  // Kept a thread: 224 px need some 600 KB a sample.
  thread_local Taps columns, rows;
  thread_local std::vector<float> narrow;
  make_taps(box.x, box.width, image.width, size, columns);
  make_taps(box.y, box.height, image.height, size, rows);
  const int top = rows.first.front();
  const int bottom = rows.first.back() + rows.count.back();
  const size_t row_length = static_cast<size_t>(size) * 3;
  narrow.resize(row_length * static_cast<size_t>(bottom - top));
  for (int y = top; y < bottom; ++y) {
    const uint8_t* row = image.pixels + static_cast<ptrdiff_t>(y) * image.width * 3;
    resample_row(row, columns, size, &narrow[row_length * static_cast<size_t>(y - top)]);
  }
  out.assign(row_length * static_cast<size_t>(size), 0.0f);
  for (size_t y = 0; y < static_cast<size_t>(size); ++y) {
    float* target = &out[row_length * y];
    for (int k = 0; k < rows.count[y]; ++k) {
      const float weight =
          rows.weight[y * static_cast<size_t>(rows.stride) + static_cast<size_t>(k)];
      const float* in = &narrow[row_length * static_cast<size_t>(rows.first[y] + k - top)];
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
    for (size_t v = 0; v < 256; ++v) {
      table_[c][v] = (static_cast<float>(v) / 255.0f - mean) / std;  // torchvision's rounding
    }
    scale_[c] = 1.0f / (255.0f * std);
    shift_[c] = -mean / std;
  }
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

void ImageTransform::apply(const ImageView& image, int full_width, int full_height, uint64_t epoch,
                           uint64_t index, float* out) const {
  if (mode_ == Augment::PadCrop) {
    pad_crop(image, epoch, index, out);
    return;
  }
  const bool random = mode_ == Augment::RandomResizedCrop;
  const CropBox box = source_box(full_width, full_height, epoch, index);
  if (!random && box.width == size_ && box.height == size_ && image.width == size_ &&
      image.height == size_) {
    copy_same_size(image, out);
    return;
  }
  thread_local std::vector<float> resized;
  const double shrink_x = static_cast<double>(image.width) / full_width;
  const double shrink_y = static_cast<double>(image.height) / full_height;
  resample(image, {box.x * shrink_x, box.y * shrink_y, box.width * shrink_x, box.height * shrink_y},
           size_, resized);
  if (!random) {
    normalise(resized.data(), false, out);
    return;
  }
  const RandomResizedCrop crop = draw(full_width, full_height, epoch, index);
  normalise(resized.data(), flip_ && crop.flip, out);
  cut_out(crop.cutout_x, crop.cutout_y, out);
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
