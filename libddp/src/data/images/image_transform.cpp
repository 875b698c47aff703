// SPDX-License-Identifier: Apache-2.0
#include "data/images/image_transform.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

namespace ddp::detail {

namespace {

constexpr uint64_t kRandAugmentStream = 0x72616E64617567ULL;  // its draws do not move the crops

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

// Kept per thread: [side, side, 3] bytes.
uint8_t* thread_bytes(int side) {
  thread_local std::vector<uint8_t> bytes;
  bytes.resize(static_cast<size_t>(side) * static_cast<size_t>(side) * 3);
  return bytes.data();
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

ImageTransform::ImageTransform(const DataOptions& options, bool train)
    : mode_(train ? options.augment : Augment::None),
      size_(static_cast<int>(options.image_size)),
      eval_resize_(static_cast<int>(options.eval_resize)),
      eval_decode_(options.eval_decode),
      seed_(static_cast<uint64_t>(options.seed)),
      pad_(static_cast<int>(options.pad)),
      flip_(options.flip),
      cutout_(static_cast<int>(options.cutout)),
      rand_augment_ops_(train ? static_cast<int>(options.rand_augment.ops) : 0),
      rand_augment_magnitude_(static_cast<int>(options.rand_augment.magnitude)),
      channels_(static_cast<int>(options.channels)),
      channels_last_(options.channels_last) {
  const auto& crop = options.random_resized_crop;
  bounds_ = {crop.min_scale,           crop.max_scale, std::log(crop.min_ratio),
             std::log(crop.max_ratio), crop.min_ratio, crop.max_ratio};
  for (size_t c = 0; c < static_cast<size_t>(channels_); ++c) {
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
  if (mode_ == Augment::RandomResizedCrop || (mode_ == Augment::None && eval_resize_ != size_) ||
      rand_augment_ops_ > 0) {
    return std::nullopt;
  }
  const auto& [scale, shift, mean, std] = normalisation_;
  return SmallImageTransform{.side = size_,
                             .channels = channels_,
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
  plan.rand_augment = draw_augment_steps(epoch, index);
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

std::vector<AugmentStep> ImageTransform::draw_augment_steps(uint64_t epoch, uint64_t index) const {
  SampleRng rng(seed_ ^ kRandAugmentStream, epoch, index);
  return draw_rand_augment(rng, rand_augment_ops_, rand_augment_magnitude_, size_);
}

void ImageTransform::apply(const ImageView& image, uint64_t epoch, uint64_t index,
                           float* out) const {
  if (mode_ != Augment::PadCrop) {
    apply(image, plan(image.width, image.height, epoch, index, /*largest_denominator=*/1), out);
    return;
  }
  SampleRng rng(seed_, epoch, index);
  const PadCrop crop = draw_pad_crop(rng, size_, pad_);
  uint8_t* bytes = thread_bytes(size_);
  pad_crop(image, crop, bytes);
  augment_and_normalise(draw_augment_steps(epoch, index), bytes, out);
  cut_out(crop.cutout_x, crop.cutout_y, out);
}

void ImageTransform::apply(const ImageView& image, const RegionPlan& plan, float* out) const {
  if (plan.same_size) {
    copy_same_size(image, out);
    return;
  }
  if (plan.exact || !plan.rand_augment.empty()) {
    uint8_t* bytes = thread_bytes(size_);
    resample_bytes(image, plan.columns, plan.rows, bytes);
    if (plan.flip) {
      mirror(bytes);
    }
    augment_and_normalise(plan.rand_augment, bytes, out);
  } else {
    thread_local std::vector<float> resized;
    resample(image, plan.columns, plan.rows, resized);
    normalise(resized.data(), plan.flip, out);
  }
  if (plan.cutout) {
    cut_out(plan.cutout_x, plan.cutout_y, out);
  }
}

void ImageTransform::augment_and_normalise(const std::vector<AugmentStep>& steps, uint8_t* bytes,
                                           float* out) const {
  for (const AugmentStep& step : steps) {
    apply_augment_step(step, size_, bytes);
  }
  copy_same_size({bytes, size_, size_}, out);
}

void ImageTransform::pad_crop(const ImageView& image, const PadCrop& crop, uint8_t* out) const {
  const ptrdiff_t row_length = static_cast<ptrdiff_t>(size_) * 3;
  // Output columns [first, last) show the image, before mirroring; the others are black.
  const int first = std::clamp(-crop.dx, 0, size_);
  const int last = std::clamp(size_ - crop.dx, first, size_);
  for (int y = 0; y < size_; ++y) {
    uint8_t* row = out + y * row_length;
    std::fill_n(row, row_length, uint8_t{0});
    const int from_y = y + crop.dy;
    if (from_y >= 0 && from_y < size_ && first < last) {
      const uint8_t* in = image.pixels + from_y * row_length + ptrdiff_t{first + crop.dx} * 3;
      std::copy_n(in, (last - first) * 3, row + first * 3);
    }
  }
  if (flip_ && crop.flip) {
    mirror(out);
  }
}

void ImageTransform::mirror(uint8_t* pixels) const {
  const ptrdiff_t row_length = static_cast<ptrdiff_t>(size_) * 3;
  for (uint8_t* row = pixels; row != pixels + size_ * row_length; row += row_length) {
    for (uint8_t *left = row, *right = row + row_length - 3; left < right; left += 3, right -= 3) {
      std::swap_ranges(left, left + 3, right);
    }
  }
}

void ImageTransform::copy_same_size(const ImageView& image, float* out) const {
  const ptrdiff_t plane = static_cast<ptrdiff_t>(size_) * size_;
  for (size_t c = 0; c < static_cast<size_t>(channels_); ++c) {
    const float* table = table_[c].data();
    float* target = channels_last_ ? out + c : out + static_cast<ptrdiff_t>(c) * plane;
    const ptrdiff_t stride = channels_last_ ? channels_ : 1;
    for (ptrdiff_t i = 0; i < plane; ++i) {
      target[i * stride] = table[image.pixels[3 * i + static_cast<ptrdiff_t>(c)]];
    }
  }
}

void ImageTransform::normalise(const float* pixels, bool flip, float* out) const {
  const ptrdiff_t plane = static_cast<ptrdiff_t>(size_) * size_;
  for (ptrdiff_t y = 0; y < size_; ++y) {
    for (ptrdiff_t c = 0; c < channels_; ++c) {
      const float scale = normalisation_.scale[c], shift = normalisation_.shift[c];
      const ptrdiff_t stride = channels_last_ ? channels_ : 1;
      float* row = channels_last_ ? out + y * size_ * channels_ + c : out + c * plane + y * size_;
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
      std::fill(out + (row * size_ + left) * channels_,
                out + (row * size_ + std::max(left, right)) * channels_, 0.0f);
      continue;
    }
    for (ptrdiff_t c = 0; c < channels_; ++c) {
      float* line = out + c * plane + row * size_;
      std::fill(line + left, line + std::max(left, right), 0.0f);
    }
  }
}

}  // namespace ddp::detail
