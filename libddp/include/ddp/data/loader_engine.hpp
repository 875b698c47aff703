// SPDX-License-Identifier: Apache-2.0
// The part of DataLoader that does not depend on its types: threads, order, position, device
// copies. Users need data_loader.hpp only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/data/batch.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/options.hpp"

namespace ddp::detail {

/// Makes batches in numbered slots. Per batch: resize() from one thread, then fill() for each place
/// from several threads concurrently, then finish() once.
class BatchBuilder {
 public:
  virtual ~BatchBuilder() = default;
  virtual void resize(int slot, int64_t num_samples) = 0;
  virtual void fill(int slot, int64_t place, int64_t index, int64_t epoch) = 0;
  virtual void finish(int slot) = 0;
};

/// Makes batches on the device from the host data of its slots.
class DeviceBuilder : public BatchBuilder {
 public:
  /// Enqueues the work on the current stream and does not wait. The slot's memory must stay
  /// unchanged until the stream has done this work.
  virtual Batch make(int slot) = 0;
};
/// Returns a builder for JPEG images on a GPU if options.device_transform allows one, else nullptr.
/// Throws SettingsError if device_transform=on is impossible.
std::unique_ptr<DeviceBuilder> make_device_builder(const std::shared_ptr<const Dataset>& dataset,
                                                   at::Device device, const LoaderOptions& options,
                                                   int num_slots, int64_t max_batch);

/// A batch that is ready.
struct LoadedBatch {
  int slot = -1;
  int64_t num_samples = 0;
};

/// A loader's place in the stream of batches.
class LoaderPlace {
 public:
  virtual ~LoaderPlace() = default;
  virtual int64_t epoch() const = 0;        ///< of the next batch to consume
  virtual int64_t position() const = 0;     ///< places of that epoch consumed by all ranks together
  virtual int64_t num_batches() const = 0;  ///< of this rank in a whole epoch
  virtual int64_t batches_left() const = 0;  ///< in this epoch
  virtual double wait_ms() const = 0;        ///< time the training loop waited for batches
  virtual StateDict state_dict() const = 0;
  virtual void load_state_dict(const StateDict& state) = 0;
  virtual void restart(int64_t epoch, int64_t position) = 0;
};

class LoaderEngine : public LoaderPlace {
 public:
  /// `builder` must outlive the engine and have num_slots(options) slots.
  LoaderEngine(const DistributedSampler& sampler, at::Device device, const LoaderOptions& options,
               BatchBuilder& builder);
  ~LoaderEngine() override;

  static int num_slots(const LoaderOptions& options);
  /// Largest number of this rank's samples in a batch. Throws SettingsError if the global batch has
  /// fewer samples than there are ranks.
  static int64_t max_batch(const DistributedSampler& sampler, const LoaderOptions& options);

  /// Waits for the oldest batch not yet acquired. Throws its loading error with sample index and
  /// epoch; SettingsError if an epoch holds no batch.
  LoadedBatch acquire();
  bool ready() const;  ///< whether acquire() returns at once
  void release();      ///< lets the oldest acquired slot be reused
  void consume();      ///< hands the oldest batch not yet consumed to the training loop
  void restart(int64_t epoch, int64_t position) override;

  /// Copies host tensors to the device on the copy stream. The slot is released after the copy.
  /// Requires copies_to_device().
  bool copies_to_device() const;
  void copy_to_device(const std::vector<at::Tensor*>& tensors);
  /// Same, for a batch that `work` makes on the copy stream from the slot's memory.
  void make_on_device(const std::function<void()>& work);
  /// The current stream waits for the oldest copy not yet joined.
  void join_copy(const std::vector<at::Tensor*>& tensors);

  int64_t epoch() const override;
  int64_t position() const override;
  int64_t num_batches() const override;
  int64_t batches_left() const override;
  double wait_ms() const override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Writes examples of a Dataset with a layout straight into one tensor per slot, optionally
/// page-locked.
class DirectBuilder : public BatchBuilder {
 public:
  DirectBuilder(std::shared_ptr<const Dataset> dataset, int num_slots, int64_t max_batch,
                bool pinned);
  void resize(int slot, int64_t num_samples) override;
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override;
  void finish(int) override {}
  /// The slot's batch: [N, shape…] and [N]. Page-locked memory is valid until the slot's next
  /// resize(). Other memory belongs to the caller as long as a view of it exists.
  at::Tensor take_data(int slot);
  at::Tensor take_target(int slot);

 private:
  struct Slot {
    at::Tensor data;    // [max_batch, shape…] in memory order
    at::Tensor target;  // [max_batch]
    int64_t num_samples = 0;
    float* data_pointer = nullptr;
    int64_t* target_pointer = nullptr;
  };
  void allocate(Slot& slot, int64_t num_samples) const;
  static bool may_reuse(const Slot& slot, int64_t num_samples);

  std::shared_ptr<const Dataset> dataset_;
  ExampleLayout layout_;
  std::vector<int64_t> memory_shape_;
  int64_t num_values_ = 1;
  bool pinned_;
  std::vector<Slot> slots_;
};

/// Whether loaders use pinned buffers for `device`.
bool uses_pinned_memory(at::Device device, const LoaderOptions& options);

/// The LibTorch dtype of `dtype`.
at::ScalarType scalar_type(ImageDtype dtype);
/// Casts a batch's data to `dtype`.
at::Tensor as_image_dtype(at::Tensor data, ImageDtype dtype);

}  // namespace ddp::detail
