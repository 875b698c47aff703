// SPDX-License-Identifier: Apache-2.0
// Synthetic images: noise plus a coarse pattern per class. A model can learn them, and making them
// is almost as fast as memory allows.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "data/sources/image_source.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/sample_rng.hpp"

namespace ddp::detail {

namespace {

constexpr int kGrid = 4;  // the pattern of a class: 3 x 4 x 4 values
constexpr uint64_t kNoiseStream = 0, kSampleStream = 1, kPatternStream = 2;

// Standardised sum of four uniforms: close to normal, from exactly rounded operations only.
float rough_normal(SampleRng& rng) {
  const float sum = rng.uniform() + rng.uniform() + rng.uniform() + rng.uniform();
  return (sum - 2.0f) * 1.7320508f;
}

class SyntheticDataset : public Dataset {
 public:
  SyntheticDataset(const DataOptions& options, Split split)
      : side_(options.image_size),
        size_(options.num_samples > 0 ? options.num_samples : (split == Split::Train ? 2048 : 512)),
        num_classes_(options.num_classes),
        channels_(options.channels),
        channels_last_(options.channels_last),
        seed_(static_cast<uint64_t>(options.seed)),
        split_(split == Split::Train ? 0 : 1) {
    const int64_t plane = side_ * side_;
    noise_.resize(static_cast<size_t>(3 * plane + std::max<int64_t>(plane, 65536)));
    SampleRng rng(seed_, kNoiseStream, 0);
    std::generate(noise_.begin(), noise_.end(), [&] { return rough_normal(rng); });
  }

  int64_t size() const override { return size_; }
  int64_t num_classes() const override { return num_classes_; }
  std::optional<ExampleLayout> layout() const override {
    return ExampleLayout{{channels_, side_, side_}, channels_last_};
  }
  Example get(int64_t index) const override { return written_example(*this, index, 0); }

  void write(int64_t index, int64_t, float* data, int64_t* target) const override {
    if (index < 0 || index >= size_) {
      throw SettingsError(concat("sample ", index, " does not exist: the data set has ", size_));
    }
    SampleRng rng(seed_, kSampleStream + 4 * split_, static_cast<uint64_t>(index));
    const int64_t label = rng.below(static_cast<uint32_t>(num_classes_));
    const int64_t plane = side_ * side_;
    const float* noise =
        noise_.data() +
        rng.below(static_cast<uint32_t>(noise_.size() - static_cast<size_t>(3 * plane)));
    std::array<float, 3 * kGrid * kGrid> pattern;
    SampleRng pattern_rng(seed_, kPatternStream, static_cast<uint64_t>(label));
    std::generate(pattern.begin(), pattern.end(), [&] { return rough_normal(pattern_rng); });
    for (int64_t c = 0; c < channels_; ++c) {
      for (int64_t y = 0; y < side_; ++y) {
        const float* cells = &pattern[static_cast<size_t>((c * kGrid + y * kGrid / side_) * kGrid)];
        const float* in = noise + c * plane + y * side_;
        const int64_t stride = channels_last_ ? channels_ : 1;
        float* out =
            channels_last_ ? data + y * side_ * channels_ + c : data + c * plane + y * side_;
        for (int64_t cell = 0; cell < kGrid; ++cell) {
          const int64_t end = ((cell + 1) * side_ + kGrid - 1) / kGrid;
          for (int64_t x = (cell * side_ + kGrid - 1) / kGrid; x < end; ++x) {
            out[x * stride] = in[x] + cells[cell];
          }
        }
      }
    }
    *target = label;
  }

 private:
  int64_t side_;
  int64_t size_;
  int64_t num_classes_;
  int64_t channels_;
  bool channels_last_;
  uint64_t seed_;
  uint64_t split_;
  std::vector<float> noise_;
};

}  // namespace

std::shared_ptr<Dataset> make_synthetic_dataset(const DataOptions& options, Split split) {
  return std::make_shared<SyntheticDataset>(options, split);
}

}  // namespace ddp::detail
