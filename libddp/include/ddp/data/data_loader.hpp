// SPDX-License-Identifier: Apache-2.0
// Batches for the training loop, prefetched by worker threads. Only the sampler decides their
// order.
//
//   ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
//   auto batch = loader.next();            // continues with the next epoch
//   for (auto& batch : eval_loader) { … }  // the rest of one epoch: all of it, after a whole one
//
// A user's data set is any class with `size()` and a thread-safe `get(index)`. A data set that
// augments has `get_for_epoch(index, epoch)` instead. A collate function turns a std::vector of
// get()'s results into a batch of any movable type. visit_tensors.hpp says how a batch type that
// goes to a GPU names its tensors.
#pragma once

#include <ATen/ops/stack.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/batch.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/device_image_loader.hpp"
#include "ddp/data/loader_engine.hpp"

namespace ddp {

/// Stacks examples along a new first dimension.
struct DefaultCollate {
  Batch operator()(std::vector<Example> examples) const;
};

namespace detail {

/// The tensors of a batch, in a fixed order. Throws SettingsError for an unknown type.
template <typename BatchT>
std::vector<at::Tensor*> tensors_of(BatchT& batch) {
  std::vector<at::Tensor*> tensors;
  const TensorVisitor visit([&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  if (!visit_tensors(batch, visit)) {
    throw SettingsError(concat("DataLoader: to copy batches of type ", typeid(BatchT).name(),
                               " to a GPU it must know their tensors: ", kDefineForEachTensor));
  }
  return tensors;
}

template <typename DatasetT>
auto get_example(DatasetT& dataset, int64_t index, int64_t epoch) {
  if constexpr (requires { dataset.get_for_epoch(index, epoch); }) {
    return dataset.get_for_epoch(index, epoch);
  } else {
    return dataset.get(index);
  }
}

/// get() and collate, for data sets and batches of any type.
template <typename DatasetT, typename Collate>
class CollatingBuilder : public BatchBuilder {
 public:
  using ExampleType = decltype(get_example(std::declval<DatasetT&>(), int64_t{}, int64_t{}));
  using BatchType = std::invoke_result_t<Collate&, std::vector<ExampleType>>;

  CollatingBuilder(std::shared_ptr<DatasetT> dataset, Collate collate, int num_slots)
      : dataset_(std::move(dataset)),
        collate_(std::move(collate)),
        slots_(static_cast<size_t>(num_slots)) {}
  void resize(int slot, int64_t num_samples) override {
    at(slot).examples.clear();
    at(slot).examples.resize(static_cast<size_t>(num_samples));
  }
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    at(slot).examples[static_cast<size_t>(place)].emplace(get_example(*dataset_, index, epoch));
  }
  void finish(int slot) override {
    std::vector<ExampleType> examples;
    examples.reserve(at(slot).examples.size());
    for (auto& example : at(slot).examples) {
      examples.push_back(std::move(*example));
    }
    at(slot).examples.clear();
    at(slot).batch.emplace(collate_(std::move(examples)));
  }
  BatchType take(int slot) {
    BatchType batch = std::move(*at(slot).batch);
    at(slot).batch.reset();
    return batch;
  }

 private:
  struct Slot {
    std::vector<std::optional<ExampleType>> examples;
    std::optional<BatchType> batch;
  };
  Slot& at(int slot) { return slots_[static_cast<size_t>(slot)]; }

  std::shared_ptr<DatasetT> dataset_;
  Collate collate_;
  std::vector<Slot> slots_;
};

}  // namespace detail

/// For one consumer thread. The loader calls set_epoch on its own copy of the sampler, so the user
/// does not. Its state (ddp::Stateful) is the epoch and position that the training loop consumed,
/// without prefetched batches. A run resumes at the next batch, also with another world size or
/// batch size.
template <typename DatasetT = Dataset, typename Collate = DefaultCollate>
class DataLoader : public Stateful {
  using Builder = detail::CollatingBuilder<DatasetT, Collate>;

 public:
  using BatchType = typename Builder::BatchType;

  /// Throws SettingsError for a sampler of another data set and for impossible batch sizes.
  DataLoader(std::shared_ptr<DatasetT> dataset, const DistributedSampler& sampler,
             at::Device device, const LoaderOptions& options = {}, Collate collate = {});

  /// Returns the next batch on the device; the next epoch follows an epoch's last batch. On CUDA
  /// the current stream, not the host, waits for the copy. Throws a batch's loading error with
  /// sample index and epoch (data errors also name file and offset). Later calls throw the error
  /// again, until begin_epoch() or load_state_dict().
  BatchType next();

  /// Jumps to the start of an epoch; does nothing if the loader is already there.
  void begin_epoch(int64_t epoch);

  /// Iterates over the batches left in the current epoch: all of them after begin_epoch() or after
  /// the last batch of the previous epoch.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = BatchType;
    using difference_type = std::ptrdiff_t;
    using pointer = BatchType*;
    using reference = BatchType&;
    Iterator(DataLoader* loader, int64_t left) : loader_(loader), left_(left) { load(); }
    BatchType& operator*() { return *batch_; }
    BatchType* operator->() { return &*batch_; }
    Iterator& operator++() {
      batch_.reset();
      --left_;
      load();
      return *this;
    }
    bool operator!=(const Iterator& other) const { return left_ != other.left_; }
    bool operator==(const Iterator& other) const { return left_ == other.left_; }

   private:
    void load() {
      if (left_ > 0) {
        batch_.emplace(loader_->next());
      }
    }
    DataLoader* loader_;
    int64_t left_;
    std::optional<BatchType> batch_;
  };
  Iterator begin() { return Iterator(this, place_->batches_left()); }
  Iterator end() { return Iterator(nullptr, 0); }

  int64_t epoch() const { return place_->epoch(); }        ///< of the batch that next() returns
  int64_t position() const { return place_->position(); }  ///< places consumed by all ranks in it
  int64_t num_batches() const { return place_->num_batches(); }  ///< of this rank in a whole epoch
  /// Milliseconds that next() waited for workers since construction.
  double wait_ms() const { return place_->wait_ms(); }
  /// The loader of a data set in GPU memory, else nullptr.
  DeviceImageLoader* device_images() { return resident_.get(); }
  const DatasetT& dataset() const { return *dataset_; }

  std::string state_name() const override { return "loader"; }
  StateDict state_dict() const override { return place_->state_dict(); }
  void load_state_dict(const StateDict& state) override {
    place_->load_state_dict(state);
    forget_staged();
  }

 private:
  static constexpr bool kMayWriteDirectly =
      std::is_base_of_v<Dataset, DatasetT> && std::is_same_v<Collate, DefaultCollate>;

  BatchType take(int slot);
  void stage();
  void forget_staged();

  std::shared_ptr<DatasetT> dataset_;
  std::unique_ptr<detail::DeviceBuilder> on_device_;  // at most one of the three builders is set
  std::unique_ptr<detail::DirectBuilder> direct_;
  std::unique_ptr<Builder> collating_;
  std::unique_ptr<DeviceImageLoader> resident_;   // instead of builders and engine
  std::unique_ptr<detail::LoaderEngine> engine_;  // destroyed first: its threads use the builders
  detail::LoaderPlace* place_ = nullptr;          // resident_ or engine_
  ImageDtype image_dtype_;
  std::optional<int> acquired_;          ///< the slot of the batch that stage() works on
  std::optional<BatchType> taken_;       ///< that slot's batch, before its copy starts
  std::deque<BatchType> staged_;         ///< being copied to the device
  std::exception_ptr read_ahead_error_;  ///< thrown by the next next()
};

template <typename DatasetT, typename Collate>
DataLoader<DatasetT, Collate>::DataLoader(std::shared_ptr<DatasetT> dataset,
                                          const DistributedSampler& sampler, at::Device device,
                                          const LoaderOptions& options, Collate collate)
    : dataset_(std::move(dataset)), image_dtype_(options.image_dtype) {
  if (!dataset_ || static_cast<int64_t>(dataset_->size()) != sampler.size()) {
    throw SettingsError(detail::concat("DataLoader: the sampler was made for ", sampler.size(),
                                       " samples, the data set has ",
                                       dataset_ ? static_cast<int64_t>(dataset_->size()) : 0,
                                       ": construct it with dataset->size()"));
  }
  if constexpr (kMayWriteDirectly) {
    if (DeviceImageLoader::is_chosen(*dataset_, device, options)) {
      resident_ = std::make_unique<DeviceImageLoader>(dataset_, sampler, device, options);
      place_ = resident_.get();
      return;
    }
  }
  const int num_slots = detail::LoaderEngine::num_slots(options);
  detail::BatchBuilder* builder = nullptr;
  if constexpr (kMayWriteDirectly) {
    on_device_ = detail::make_device_builder(dataset_, device, options, num_slots,
                                             detail::LoaderEngine::max_batch(sampler, options));
    builder = on_device_.get();
    if (!builder && dataset_->layout()) {
      direct_ = std::make_unique<detail::DirectBuilder>(
          dataset_, num_slots, detail::LoaderEngine::max_batch(sampler, options),
          detail::uses_pinned_memory(device, options));
      builder = direct_.get();
    }
  }
  if (!builder) {
    collating_ = std::make_unique<Builder>(dataset_, std::move(collate), num_slots);
    builder = collating_.get();
  }
  engine_ = std::make_unique<detail::LoaderEngine>(sampler, device, options, *builder);
  place_ = engine_.get();
}

template <typename DatasetT, typename Collate>
auto DataLoader<DatasetT, Collate>::take(int slot) -> BatchType {
  if constexpr (kMayWriteDirectly) {
    if (direct_) {
      return {direct_->take_data(slot), direct_->take_target(slot)};
    }
  }
  return collating_->take(slot);
}

// After an out-of-memory error, the next call continues with the same batch.
template <typename DatasetT, typename Collate>
void DataLoader<DatasetT, Collate>::stage() {
  if (!acquired_) {
    acquired_ = engine_->acquire().slot;
  }
  if (on_device_) {
    if constexpr (kMayWriteDirectly) {
      engine_->make_on_device([&] { taken_ = on_device_->make(*acquired_); });
    }
  } else {
    if (!taken_) {
      taken_.emplace(take(*acquired_));
    }
    if (!engine_->copies_to_device()) {
      engine_->release();
    } else {
      engine_->copy_to_device(detail::tensors_of(*taken_));
    }
  }
  staged_.push_back(std::move(*taken_));
  taken_.reset();
  acquired_.reset();
}

template <typename DatasetT, typename Collate>
auto DataLoader<DatasetT, Collate>::next() -> BatchType {
  if constexpr (kMayWriteDirectly) {
    if (resident_) {
      return resident_->next();
    }
  }
  if (const auto error = std::exchange(read_ahead_error_, nullptr)) {
    std::rethrow_exception(error);
  }
  if (staged_.empty()) {
    stage();
  }
  BatchType batch = std::move(staged_.front());
  staged_.pop_front();
  if (engine_->copies_to_device()) {
    engine_->join_copy(detail::tensors_of(batch));
  }
  engine_->consume();
  if constexpr (kMayWriteDirectly) {
    batch.data = detail::as_image_dtype(std::move(batch.data), image_dtype_);
  }
  // If the next batch is ready, its copy overlaps this step. The next call throws its error.
  if (engine_->copies_to_device() && staged_.empty() && engine_->ready()) {
    try {
      stage();
    } catch (...) {
      read_ahead_error_ = std::current_exception();
    }
  }
  return batch;
}

template <typename DatasetT, typename Collate>
void DataLoader<DatasetT, Collate>::begin_epoch(int64_t epoch) {
  if (place_->epoch() == epoch && place_->position() == 0) {
    return;
  }
  place_->restart(epoch, 0);
  forget_staged();
}

template <typename DatasetT, typename Collate>
void DataLoader<DatasetT, Collate>::forget_staged() {
  acquired_.reset();
  taken_.reset();
  staged_.clear();
  read_ahead_error_ = nullptr;
}

}  // namespace ddp
