// SPDX-License-Identifier: Apache-2.0
// A data set of images: a source (or decoded images in memory), a transform and a policy for
// corrupt files.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "data/images/image_transform.hpp"
#include "data/sources/image_source.hpp"
#include "ddp/data/dataset.hpp"

namespace ddp::detail {

/// Replaces the settings whose 0, empty or `auto` means "from the data" (format, image_size,
/// channels, num_classes, augment, eval_resize, mean, std) with their values.
DataOptions resolve_data_options(const DataOptions& options);

class ImageDataset : public Dataset {
 public:
  /// Decodes the source again for each sample, or once, here, with `keep_decoded`.
  ImageDataset(std::unique_ptr<ImageSource> source, const DataOptions& resolved, bool train,
               bool keep_decoded);
  /// For RGB images already decoded to `image_size`.
  ImageDataset(DecodedImages images, int64_t num_classes, const DataOptions& resolved, bool train);

  int64_t size() const override { return size_; }
  Example get(int64_t index) const override { return get_for_epoch(index, 0); }
  Example get_for_epoch(int64_t index, int64_t epoch) const override {
    return written_example(*this, index, epoch);
  }
  std::optional<ExampleLayout> layout() const override;
  void write(int64_t index, int64_t epoch, float* data, int64_t* target) const override;
  int64_t num_classes() const override { return num_classes_; }
  std::vector<std::string> class_names() const override {
    return source_ ? source_->class_names() : decoded_.class_names;
  }
  int64_t num_skipped() const override;

  /// The decoded images if kept, else nullptr.
  const DecodedImages* decoded() const { return decoded_.labels.empty() ? nullptr : &decoded_; }
  const ImageTransform& transform() const { return transform_; }
  /// Calls `use` with a sample's file after reading its header. On DataError, data.corrupt decides
  /// whether to try another sample. Returns the target of the sample used. Thread-safe. Not for
  /// images kept decoded.
  using UseFile = std::function<void(const std::vector<uint8_t>& bytes, const DataSource& where,
                                     const ImageHeader& header)>;
  int64_t read_file(int64_t index, const UseFile& use) const;
  /// Decodes the region of a sample's image to [region.height, region.width, 3], in memory from
  /// `allocate(plan)`; otherwise as read_file(). Images with an exact plan are resized here, and
  /// the plan then describes an image of the output's size.
  int64_t read_region(int64_t index, int64_t epoch, RegionPlan& plan,
                      const std::function<uint8_t*(const RegionPlan&)>& allocate) const;

 private:
  void decode_all();
  void check_labels() const;
  /// Calls `use(candidate)` with index, index + 1, … until a call throws no DataError. The result
  /// depends on the files only, so all ranks agree.
  template <typename F>
  int64_t first_good(int64_t index, F&& use) const;
  void record_corrupt(int64_t index, const std::string& message) const;

  std::unique_ptr<ImageSource> source_;
  DataOptions options_;
  ImageTransform transform_;
  DecodedImages decoded_;
  int64_t size_ = 0;
  int64_t num_classes_ = 0;
  mutable std::mutex mutex_;
  mutable std::set<int64_t> corrupt_;
};

/// `dataset` as a data set of images, else nullptr.
inline const ImageDataset* as_images(const Dataset& dataset) {
  return dynamic_cast<const ImageDataset*>(&dataset);
}

/// Adds the fix to an image's error, for data.corrupt=error.
DataError with_fix(const CorruptImage& corrupt, const char* fix = kCorruptFix);

}  // namespace ddp::detail
