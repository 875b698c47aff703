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

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/device_image_loader.hpp"
#include "ddp/detail/batch_source.hpp"
#include "ddp/detail/prefetch_source.hpp"

namespace ddp {

/// Stacks examples along a new first dimension.
struct DefaultCollate {
  Batch operator()(std::vector<Example> examples) const;
};

namespace detail {

/// For the library's data sets, whose batches a GPU may make.
std::unique_ptr<BatchSource<Batch>> make_batch_source(std::shared_ptr<const Dataset> dataset,
                                                      const DistributedSampler& sampler,
                                                      at::Device device,
                                                      const LoaderOptions& options,
                                                      DefaultCollate collate);

template <typename DatasetT, typename Collate>
requires(!std::derived_from<DatasetT, Dataset> || !std::same_as<Collate, DefaultCollate>)
    std::unique_ptr<BatchSource<BatchOf<DatasetT, Collate>>> make_batch_source(
        std::shared_ptr<DatasetT> dataset, const DistributedSampler& sampler, at::Device device,
        const LoaderOptions& options, Collate collate) {
  return std::make_unique<PrefetchSource<BatchOf<DatasetT, Collate>>>(
      std::make_unique<CollatingBuilder<DatasetT, Collate>>(std::move(dataset), std::move(collate),
                                                            LoaderEngine::num_slots(options)),
      sampler, device, options);
}

}  // namespace detail

/// For one consumer thread. The loader calls set_epoch on its own copy of the sampler, so the user
/// does not. Its state (ddp::Stateful) is the epoch and position that the training loop consumed,
/// without prefetched batches. A run resumes at the next batch, also with another world size or
/// batch size.
template <typename DatasetT = Dataset, typename Collate = DefaultCollate>
class DataLoader : public Stateful {
 public:
  using BatchType = detail::BatchOf<DatasetT, Collate>;

  /// Throws SettingsError for a sampler of another data set and for impossible batch sizes.
  DataLoader(std::shared_ptr<DatasetT> dataset, const DistributedSampler& sampler,
             at::Device device, const LoaderOptions& options = {}, Collate collate = {})
      : dataset_(detail::checked_size(std::move(dataset), sampler)),
        source_(detail::make_batch_source(dataset_, sampler, device, options, std::move(collate))),
        batches_(sampler, options) {}

  /// Returns the next batch on the device; the next epoch follows an epoch's last batch. On CUDA
  /// the current stream, not the host, waits for the copy. Throws a batch's loading error with
  /// sample index and epoch (data errors also name file and offset). Later calls throw the error
  /// again, until begin_epoch() or load_state_dict().
  BatchType next() { return source_->next(); }

  /// Jumps to the start of an epoch; does nothing if the loader is already there.
  void begin_epoch(int64_t epoch) {
    if (const auto now = source_->place(); now.epoch != epoch || now.position != 0) {
      source_->restart({epoch, 0});
    }
  }

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
  Iterator begin() { return Iterator(this, batches_left()); }
  Iterator end() { return Iterator(nullptr, 0); }

  int64_t epoch() const { return source_->place().epoch; }         ///< of the batch of next()
  int64_t position() const { return source_->place().position; }   ///< consumed by all ranks in it
  int64_t num_batches() const { return batches_.count_after(0); }  ///< of this rank in an epoch
  int64_t batches_left() const { return batches_.count_after(position()); }  ///< in this epoch
  /// Milliseconds that next() waited for workers since construction.
  double wait_ms() const { return source_->wait_ms(); }
  /// The loader of a data set in GPU memory, else nullptr.
  DeviceImageLoader* device_images() { return dynamic_cast<DeviceImageLoader*>(source_.get()); }
  const DatasetT& dataset() const { return *dataset_; }

  std::string state_name() const override { return "loader"; }
  StateDict state_dict() const override { return batches_.state_of(source_->place()); }
  void load_state_dict(const StateDict& state) override {
    source_->restart(batches_.place_in(state));
  }

 private:
  std::shared_ptr<DatasetT> dataset_;
  std::unique_ptr<detail::BatchSource<BatchType>> source_;
  detail::EpochBatches batches_;
};

}  // namespace ddp
