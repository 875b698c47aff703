// SPDX-License-Identifier: Apache-2.0
// Batches that worker threads prepare ahead of the training loop, for data sets and batches of any
// type.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/data/dataset.hpp"
#include "ddp/detail/batch_source.hpp"
#include "ddp/detail/loader_types.hpp"
#include "ddp/detail/visit_tensors.hpp"

namespace ddp::detail {

/// Puts samples into numbered slots. Per batch: resize() from one thread, then fill() for each
/// place from several threads concurrently, then finish() once.
class SlotFiller {
 public:
  virtual ~SlotFiller() = default;
  virtual void resize(int slot, int64_t num_samples) = 0;
  virtual void fill(int slot, int64_t place, int64_t index, int64_t epoch) = 0;
  virtual void finish(int slot) = 0;
};

/// Makes batches of the samples in its slots.
template <typename BatchT>
class BatchBuilder : public SlotFiller {
 public:
  /// The batch of a finished slot, on the consumer's thread. A slot's memory stays unchanged until
  /// the batch is copied.
  virtual BatchT take(int slot) = 0;
  /// Whether take() makes the batch on the device. It then enqueues its work on the current stream,
  /// does not wait, and may be called again after it threw.
  virtual bool builds_on_device() const { return false; }
};

/// The part of a PrefetchSource that does not depend on its types: threads, order, place, device
/// copies.
class LoaderEngine {
 public:
  /// `filler` must outlive the engine and have num_slots(options) slots.
  LoaderEngine(const DistributedSampler& sampler, at::Device device, const LoaderOptions& options,
               SlotFiller& filler);
  ~LoaderEngine();
  LoaderEngine(const LoaderEngine&) = delete;
  LoaderEngine& operator=(const LoaderEngine&) = delete;

  static int num_slots(const LoaderOptions& options);

  /// Waits for the oldest batch not yet acquired and returns its slot. Throws its loading error
  /// with sample index and epoch; SettingsError if an epoch holds no batch.
  int acquire();
  bool ready() const;  ///< whether acquire() returns at once
  void release();      ///< lets the oldest acquired slot be reused
  void consume();      ///< hands the oldest batch not yet consumed to the training loop
  void restart(LoaderPlace place);

  /// Copies host tensors to the device on the copy stream. The slot is released after the copy.
  /// Requires copies_to_device().
  bool copies_to_device() const;
  void copy_to_device(const std::vector<at::Tensor*>& tensors);
  /// Same, for a batch that `work` makes on the copy stream from the slot's memory.
  void make_on_device(const std::function<void()>& work);
  /// The current stream waits for the oldest copy not yet joined.
  void join_copy(const std::vector<at::Tensor*>& tensors);

  LoaderPlace place() const;
  double wait_ms() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The tensors of a batch, in a fixed order.
template <typename BatchT>
std::vector<at::Tensor*> tensors_of(BatchT& batch) {
  std::vector<at::Tensor*> tensors;
  visit_tensors(batch, TensorVisitor([&](at::Tensor& tensor) { tensors.push_back(&tensor); }));
  return tensors;
}

/// Moves strided host tensors to page-locked memory.
void pin_tensors(const std::vector<at::Tensor*>& tensors);
/// Whether batches for `device` are made in page-locked memory.
inline bool uses_pinned_memory(at::Device device, const LoaderOptions& options) {
  return device.is_cuda() && options.pin_memory;
}

/// Batches of a builder whose slots worker threads fill ahead.
template <typename BatchT>
class PrefetchSource final : public BatchSource<BatchT> {
 public:
  /// `finish`, if set, changes each batch on the current stream before next() returns the batch.
  PrefetchSource(std::unique_ptr<BatchBuilder<BatchT>> builder, const DistributedSampler& sampler,
                 at::Device device, const LoaderOptions& options,
                 std::function<void(BatchT&)> finish = nullptr)
      : builder_(std::move(builder)),
        finish_(std::move(finish)),
        engine_(sampler, device, options, *builder_) {}

  BatchT next() override {
    if (const auto error = std::exchange(read_ahead_error_, nullptr)) {
      std::rethrow_exception(error);
    }
    if (staged_.empty()) {
      stage();
    }
    BatchT batch = std::move(staged_.front());
    staged_.pop_front();
    if (engine_.copies_to_device()) {
      engine_.join_copy(tensors_of(batch));
    }
    engine_.consume();
    if (finish_) {
      finish_(batch);
    }
    // If the next batch is ready, its copy overlaps this step. The next call throws its error.
    if (engine_.copies_to_device() && staged_.empty() && engine_.ready()) {
      try {
        stage();
      } catch (...) {
        read_ahead_error_ = std::current_exception();
      }
    }
    return batch;
  }
  void restart(LoaderPlace place) override {
    engine_.restart(place);
    acquired_.reset();
    taken_.reset();
    staged_.clear();
    read_ahead_error_ = nullptr;
  }
  LoaderPlace place() const override { return engine_.place(); }
  double wait_ms() const override { return engine_.wait_ms(); }

 private:
  // After an out-of-memory error, the next call continues with the same batch.
  void stage() {
    if (!acquired_) {
      acquired_ = engine_.acquire();
    }
    if (builder_->builds_on_device()) {
      engine_.make_on_device([&] { taken_.emplace(builder_->take(*acquired_)); });
    } else {
      if (!taken_) {
        taken_.emplace(builder_->take(*acquired_));
      }
      if (!engine_.copies_to_device()) {
        engine_.release();
      } else {
        engine_.copy_to_device(tensors_of(*taken_));
      }
    }
    staged_.push_back(std::move(*taken_));
    taken_.reset();
    acquired_.reset();
  }

  std::unique_ptr<BatchBuilder<BatchT>> builder_;
  std::function<void(BatchT&)> finish_;
  LoaderEngine engine_;                  // destroyed before the builder, which its threads use
  std::optional<int> acquired_;          // the slot of the batch that stage() works on
  std::optional<BatchT> taken_;          // that slot's batch, before its copy starts
  std::deque<BatchT> staged_;            // being copied to the device
  std::exception_ptr read_ahead_error_;  // thrown by the next next()
};

[[noreturn]] void fail_for_size(const DistributedSampler& sampler, int64_t dataset_size);

/// Returns `dataset`. Throws SettingsError if it is null or `sampler` was made for another size.
template <typename DatasetT>
std::shared_ptr<DatasetT> checked_size(std::shared_ptr<DatasetT> dataset,
                                       const DistributedSampler& sampler) {
  if constexpr (HasSize<DatasetT>) {  // else the compiler has reported that
    const int64_t size = dataset ? static_cast<int64_t>(dataset->size()) : 0;
    if (!dataset || size != sampler.size()) {
      fail_for_size(sampler, size);
    }
  }
  return dataset;
}

template <typename DatasetT, typename Collate>
using BatchOf = typename LoaderTypes<DatasetT, Collate>::BatchType;

/// get() and collate, for data sets and batches of any type.
template <typename DatasetT, typename Collate>
class CollatingBuilder final : public BatchBuilder<BatchOf<DatasetT, Collate>> {
 public:
  CollatingBuilder(std::shared_ptr<DatasetT> dataset, Collate collate, int num_slots, bool pinned)
      : dataset_(std::move(dataset)),
        collate_(std::move(collate)),
        pinned_(pinned),
        slots_(static_cast<size_t>(num_slots)) {}
  void resize(int slot, int64_t num_samples) override {
    at(slot).examples.clear();
    at(slot).examples.resize(static_cast<size_t>(num_samples));
  }
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    at(slot).examples[static_cast<size_t>(place)].emplace(get_example(*dataset_, index, epoch));
  }
  void finish(int slot) override {
    std::vector<ExampleOf<DatasetT>> examples;
    examples.reserve(at(slot).examples.size());
    for (auto& example : at(slot).examples) {
      examples.push_back(std::move(*example));
    }
    at(slot).examples.clear();
    auto& batch = at(slot).batch.emplace(collate_(std::move(examples)));
    if (pinned_) {
      pin_tensors(tensors_of(batch));
    }
  }
  BatchOf<DatasetT, Collate> take(int slot) override {
    auto batch = std::move(*at(slot).batch);
    at(slot).batch.reset();
    return batch;
  }

 private:
  struct Slot {
    std::vector<std::optional<ExampleOf<DatasetT>>> examples;
    std::optional<BatchOf<DatasetT, Collate>> batch;
  };
  Slot& at(int slot) { return slots_[static_cast<size_t>(slot)]; }

  std::shared_ptr<DatasetT> dataset_;
  Collate collate_;
  bool pinned_;
  std::vector<Slot> slots_;
};

/// The source of the library's data sets, whose batches a GPU may make.
std::unique_ptr<BatchSource<Batch>> make_batch_source(std::shared_ptr<const Dataset> dataset,
                                                      const DistributedSampler& sampler,
                                                      at::Device device,
                                                      const LoaderOptions& options,
                                                      DefaultCollate collate);

/// A data set with get_batch(): its samples are indices, and it collates them itself.
struct IndexDataset {
  int64_t num_samples = 0;
  int64_t size() const { return num_samples; }
  int64_t get(int64_t index) const { return index; }
};
template <typename DatasetT>
struct GetBatch {
  std::shared_ptr<DatasetT> dataset;
  auto operator()(std::vector<int64_t> indices) const {
    return dataset->get_batch(std::move(indices));
  }
};

template <typename DatasetT, typename Collate>
requires(!std::derived_from<DatasetT, Dataset> || !std::same_as<Collate, DefaultCollate> ||
         HasBatches<DatasetT>)  //
    std::unique_ptr<BatchSource<BatchOf<DatasetT, Collate>>> make_batch_source(
        std::shared_ptr<DatasetT> dataset, const DistributedSampler& sampler, at::Device device,
        const LoaderOptions& options, Collate collate) {
  const auto make = [&](auto data, auto stack) {
    using Builder = CollatingBuilder<typename decltype(data)::element_type, decltype(stack)>;
    return std::make_unique<PrefetchSource<BatchOf<DatasetT, Collate>>>(
        std::make_unique<Builder>(std::move(data), std::move(stack),
                                  LoaderEngine::num_slots(options),
                                  uses_pinned_memory(device, options)),
        sampler, device, options);
  };
  if constexpr (!LoaderTypes<DatasetT, Collate>::kValid) {
    return nullptr;
  } else if constexpr (kGetsBatches<DatasetT, Collate>) {
    return make(std::make_shared<IndexDataset>(IndexDataset{sampler.size()}),
                GetBatch<DatasetT>{std::move(dataset)});
  } else {
    return make(std::move(dataset), std::move(collate));
  }
}

}  // namespace ddp::detail
