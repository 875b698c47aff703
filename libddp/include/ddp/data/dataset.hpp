// SPDX-License-Identifier: Apache-2.0
// Data sets: anything with a size that gives an example for an index.
//
// A DataLoader takes any class with `size()` and a thread-safe `get(index)` (of any return type,
// with a collate function for it); deriving from Dataset is only needed to keep data sets of
// several kinds behind one pointer, or to write straight into batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/data/options.hpp"

namespace ddp {

namespace detail {
class ImageDataset;
}

/// One sample: `data` of any shape, and `target`, an int64 scalar for classification.
struct Example {
  at::Tensor data;
  at::Tensor target;
};

/// All examples are float32 of one shape, with an int64 class as target.
struct ExampleLayout {
  std::vector<int64_t> shape;  ///< without the batch dimension, for example {3, 32, 32}
  bool channels_last = false;  ///< memory order of an example is [H, W, C]
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;

  /// Sample `index`, 0 .. size() - 1, as in epoch 0. Called by several threads at once. Throws
  /// DataError naming file and offset.
  virtual Example get(int64_t index) const = 0;
  /// The same as it looks in an epoch, for data sets that augment: a function of (index, epoch)
  /// alone.
  virtual Example get_for_epoch(int64_t index, int64_t epoch) const {
    (void)epoch;
    return get(index);
  }

  /// Where it has a value, loaders call write() with memory inside the batch instead of get().
  virtual std::optional<ExampleLayout> layout() const { return std::nullopt; }
  virtual void write(int64_t index, int64_t epoch, float* data, int64_t* target) const;

  virtual int64_t num_classes() const { return 0; }  ///< 0 where that means nothing
  /// Names by number, where the data has them; of two splits they must be equal.
  virtual std::vector<std::string> class_names() const { return {}; }
  /// Corrupt samples met so far and replaced (data.corrupt = skip).
  virtual int64_t num_skipped() const { return 0; }
  /// The library's own data set of images, whose batches a GPU can make; for the loaders.
  virtual const detail::ImageDataset* image_dataset() const { return nullptr; }
};

enum class Split { Train, Test };

/// The data set that `options` name: its training split with augmentation, or its test split
/// without. Throws SettingsError for settings that do not fit, DataError for missing or broken
/// files.
std::shared_ptr<Dataset> make_dataset(const DataOptions& options, Split split = Split::Train);

/// `options` with every 0, empty and `auto` replaced by what the data at `path` says.
DataOptions resolve_data_options(const DataOptions& options);

}  // namespace ddp
