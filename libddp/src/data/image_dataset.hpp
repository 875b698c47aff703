// SPDX-License-Identifier: Apache-2.0
// A data set of images: a source (or images kept decoded in memory), a transform, and what happens
// to corrupt files.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "data/image_source.hpp"
#include "data/image_transform.hpp"
#include "ddp/data/dataset.hpp"

namespace ddp::detail {

/// Decoded images of one size, [n, size, size, 3].
struct DecodedImages {
  std::vector<uint8_t> pixels;
  std::vector<int64_t> labels;
};

class ImageDataset : public Dataset {
 public:
  /// Of a source that is decoded anew for each sample, or once now where `keep_decoded`.
  ImageDataset(std::unique_ptr<ImageSource> source, const DataOptions& resolved, bool train,
               bool keep_decoded);
  /// Of images already decoded, of `image_size`.
  ImageDataset(DecodedImages images, int64_t num_classes, const DataOptions& resolved, bool train);

  int64_t size() const override { return size_; }
  Example get(int64_t index) const override { return get_for_epoch(index, 0); }
  Example get_for_epoch(int64_t index, int64_t epoch) const override;
  std::optional<ExampleLayout> layout() const override;
  void write(int64_t index, int64_t epoch, float* data, int64_t* target) const override;
  int64_t num_classes() const override { return num_classes_; }
  std::vector<std::string> class_names() const override {
    return source_ ? source_->class_names() : std::vector<std::string>{};
  }
  int64_t num_skipped() const override;
  const ImageDataset* image_dataset() const override { return this; }

  /// The images where they are kept decoded, else nullptr.
  const DecodedImages* decoded() const { return decoded_.labels.empty() ? nullptr : &decoded_; }
  const ImageTransform& transform() const { return transform_; }
  /// Calls `use` with the file of a sample, whose header was read; where that throws DataError,
  /// data.corrupt says whether with another one's. Returns the target of the one it took. Several
  /// threads at once. Not of images kept decoded.
  using UseFile = std::function<void(const std::vector<uint8_t>& bytes, const DataSource& where,
                                     const ImageHeader& header)>;
  int64_t read_file(int64_t index, const UseFile& use) const;
  /// Decodes what a sample of an epoch needs of its image to [region.height, region.width, 3] in
  /// memory that `allocate` gives for a plan; else as read_file(). An image that is resized exactly
  /// is resized here: the plan is then of one that has the output's size.
  int64_t read_region(int64_t index, int64_t epoch, RegionPlan& plan,
                      const std::function<uint8_t*(const RegionPlan&)>& allocate) const;
  /// What makes a sample of a decoded image, where that is no resizing.
  std::optional<SmallImageTransform> small_image_transform() const {
    return transform_.small_image_transform();
  }

 private:
  void decode_all();
  void decode_square(int64_t index, const ImageTransform& square, uint8_t* out) const;
  void check_labels() const;
  /// Calls `use(candidate)` with index, index + 1, … until one does not throw DataError; the answer
  /// is the same on every rank, as it depends on the files alone.
  template <typename F>
  int64_t first_good(int64_t index, F&& use) const;
  void note_corrupt(int64_t index, const std::string& message) const;

  std::unique_ptr<ImageSource> source_;
  DataOptions options_;
  ImageTransform transform_;
  DecodedImages decoded_;
  int64_t size_ = 0;
  int64_t num_classes_ = 0;
  mutable std::mutex mutex_;
  mutable std::set<int64_t> corrupt_;
};

/// An image's error with what a user can do about it, where data.corrupt=error.
DataError with_fix(const CorruptImage& corrupt);

}  // namespace ddp::detail
