// SPDX-License-Identifier: Apache-2.0
// Data sets: a size, and an example for each index. A DataLoader takes any such class; derive from
// Dataset to hold several kinds behind one pointer, or to write straight into batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/options.hpp"

namespace ddp {

/// N samples, on the loader's device.
struct Batch {
  at::Tensor data;                               ///< [N, …]
  at::Tensor target;                             ///< [N]
  int64_t size() const { return data.size(0); }  ///< N
};
void for_each_tensor(Batch& batch, const TensorVisitor& visit);

/// One sample: `data` of any shape, and `target`, an int64 scalar for classification.
struct Example {
  at::Tensor data;    ///< float32 of one shape for all samples
  at::Tensor target;  ///< the class, or any tensor
};

/// Stacks examples along a new first dimension.
struct DefaultCollate {
  Batch operator()(std::vector<Example> examples) const;  ///< all of one shape and dtype
};

/// All examples are float32 of one shape, with an int64 class as target.
struct ExampleLayout {
  std::vector<int64_t> shape;  ///< without the batch dimension, for example {3, 32, 32}
  bool channels_last = false;  ///< memory order of an example is [H, W, C]
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  ///< number of samples

  /// Sample `index`, as in epoch 0. Thread safe. Throws DataError naming file and offset.
  virtual Example get(int64_t index) const = 0;
  /// For data sets that augment. Depends on (index, epoch) only.
  virtual Example get_for_epoch(int64_t index, int64_t /*epoch*/) const { return get(index); }

  /// If set, loaders call write() with the batch's memory instead of get().
  virtual std::optional<ExampleLayout> layout() const { return std::nullopt; }
  /// Writes get_for_epoch() in that layout. Thread safe.
  virtual void write(int64_t index, int64_t epoch, float* data, int64_t* target) const;

  virtual int64_t num_classes() const { return 0; }  ///< 0: no classes
  /// Names by class number, empty if the data has none. Both splits must have equal names.
  virtual std::vector<std::string> class_names() const { return {}; }
  virtual int64_t num_skipped() const { return 0; }  ///< corrupt samples replaced so far
};

enum class Split { Train, Test };  ///< training or evaluation data

/// Opens the data set of `options`: the training split with augmentation, or the test split
/// without. Throws SettingsError for unsuitable settings, DataError for missing or broken files.
std::shared_ptr<Dataset> make_dataset(const DataOptions& options, Split split = Split::Train);

}  // namespace ddp
