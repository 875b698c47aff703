// SPDX-License-Identifier: Apache-2.0
#include "data/image_transform.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "data/image_resample.hpp"

namespace ddp::detail {

namespace {

// The smallest decoding (1/8, 1/4, 1/2 of the size, done in the inverse DCT) that keeps at least
// `size` of the `shorter` pixels.
int choose_denominator(int shorter, int size, int largest) {
  for (int denominator : {8, 4, 2}) {
    if (denominator <= largest && shorter / denominator >= size) {
      return denominator;
    }
  }
  return 1;
}

int decoded_side(int side, int denominator) {
  return (side + denominator - 1) / denominator;
}

// torchvision's Resize(resize): truncates the quotient of the longer side.
int64_t resized_side(int side, int shorter, int resize) {
  return static_cast<int64_t>(static_cast<double>(int64_t{resize} * side) / shorter);
}

// torchvision's CenterCrop(size) of an image of `limit` pixels resized to `outputs`. Python's
// round() rounds halves to even.
ResampleAxis centre_axis(int64_t outputs, int limit, int size) {
  const int64_t twice = outputs - size;
  const int64_t first = twice / 2 + (twice % 2 != 0 && twice / 2 % 2 != 0 ? 1 : 0);
  return {0, static_cast<double>(limit), limit, outputs, first, size};
}

}  // namespace

ImageTransform::ImageTransform(const DataOptions& options, bool train)
    : mode_(train ? options.augment : Augment::None),
      size_(static_cast<int>(options.image_size)),
      eval_resize_(static_cast<int>(options.eval_resize)),
      eval_decode_(options.eval_decode),
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
    normalisation_.mean[c] = mean;
    normalisation_.std[c] = std;
    normalisation_.scale[c] = 1.0f / (255.0f * std);
    normalisation_.shift[c] = -mean / std;
    for (size_t v = 0; v < 256; ++v) {
      table_[c][v] = normalise_byte(static_cast<uint8_t>(v), mean, std);
    }
  }
}

std::optional<SmallImageTransform> ImageTransform::small_image_transform() const {
  if (mode_ == Augment::RandomResizedCrop || (mode_ == Augment::None && eval_resize_ != size_)) {
    return std::nullopt;
  }
  const auto& [scale, shift, mean, std] = normalisation_;
  return SmallImageTransform{.side = size_,
                             .random = mode_ == Augment::PadCrop,
                             .flip = flip_,
                             .pad = pad_,
                             .cutout = cutout_,
                             .seed = seed_,
                             .mean = {mean[0], mean[1], mean[2]},
                             .std = {std[0], std[1], std[2]}};
}

RegionPlan ImageTransform::plan_crop(int width, int height, uint64_t epoch, uint64_t index,
                                     int largest_denominator) const {
  SampleRng rng(seed_, epoch, index);
  const RandomResizedCrop crop = draw_random_resized_crop(rng, width, height, size_, bounds_);
  const CropBox& box = crop.box;
  RegionPlan plan;
  plan.denominator =
      choose_denominator(std::min(box.width, box.height), size_, largest_denominator);
  plan.whole_width = decoded_side(width, plan.denominator);
  plan.whole_height = decoded_side(height, plan.denominator);
  const double shrink_x = static_cast<double>(plan.whole_width) / width;
  const double shrink_y = static_cast<double>(plan.whole_height) / height;
  plan.columns = {box.x * shrink_x, box.width * shrink_x, plan.whole_width, size_};
  plan.rows = {box.y * shrink_y, box.height * shrink_y, plan.whole_height, size_};
  plan.flip = flip_ && crop.flip;
  plan.cutout = cutout_ > 0;
  plan.cutout_x = crop.cutout_x;
  plan.cutout_y = crop.cutout_y;
  return plan;
}

RegionPlan ImageTransform::plan_centre(int width, int height, int largest_denominator) const {
  const int shorter = std::min(width, height);
  RegionPlan plan;
  plan.exact = is_exact();
  plan.denominator =
      plan.exact ? 1 : choose_denominator(shorter, eval_resize_, largest_denominator);
  plan.whole_width = decoded_side(width, plan.denominator);
  plan.whole_height = decoded_side(height, plan.denominator);
  plan.columns = centre_axis(resized_side(width, shorter, eval_resize_), plan.whole_width, size_);
  plan.rows = centre_axis(resized_side(height, shorter, eval_resize_), plan.whole_height, size_);
  plan.same_size = eval_resize_ == size_ && plan.whole_width == size_ && plan.whole_height == size_;
  return plan;
}

RegionPlan ImageTransform::plan(int width, int height, uint64_t epoch, uint64_t index,
                                int largest_denominator) const {
  RegionPlan plan = mode_ == Augment::RandomResizedCrop
                        ? plan_crop(width, height, epoch, index, largest_denominator)
                        : plan_centre(width, height, largest_denominator);
  plan.region = {first_used(plan.columns), first_used(plan.rows),
                 end_used(plan.columns) - first_used(plan.columns),
                 end_used(plan.rows) - first_used(plan.rows)};
  return plan;
}

RegionPlan ImageTransform::plan_same_size() const {
  RegionPlan plan;
  plan.whole_width = plan.whole_height = size_;
  plan.region = {0, 0, size_, size_};
  plan.columns = plan.rows = {0, double(size_), size_, size_};
  plan.same_size = true;
  return plan;
}

void ImageTransform::apply(const ImageView& image, uint64_t epoch, uint64_t index,
                           float* out) const {
  if (mode_ == Augment::PadCrop) {
    pad_crop(image, epoch, index, out);
  } else {
    apply(image, plan(image.width, image.height, epoch, index, /*largest_denominator=*/1), out);
  }
}

void ImageTransform::apply(const ImageView& image, const RegionPlan& plan, float* out) const {
  if (plan.same_size) {
    copy_same_size(image, out);
    return;
  }
  if (plan.exact) {
    thread_local std::vector<uint8_t> bytes;
    bytes.resize(static_cast<size_t>(size_) * static_cast<size_t>(size_) * 3);
    resample_bytes(image, plan.columns, plan.rows, bytes.data());
    copy_same_size({bytes.data(), size_, size_}, out);
    return;
  }
  thread_local std::vector<float> resized;
  resample(image, plan.columns, plan.rows, resized);
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
      const float scale = normalisation_.scale[c], shift = normalisation_.shift[c];
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
