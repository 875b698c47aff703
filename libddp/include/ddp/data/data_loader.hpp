// SPDX-License-Identifier: Apache-2.0
// Batches for the training loop, prefetched by worker threads in the sampler's order.
//
//   ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
//   auto batch = loader.next();            // continues with the next epoch
//   for (auto& batch : eval_loader) { … }  // the batches left in the current epoch
//
// A user's data set is any class with `size()` and a thread-safe `get(index)`, or, if it augments,
// `get_for_epoch(index, epoch)`, which draws from a SampleRng. A collate function turns a
// std::vector of get()'s results into a batch of any movable type. Without a collate function,
// `get_batch(std::vector<int64_t> indices)` may make whole batches. Worker threads call get_batch
// concurrently. visit_tensors.hpp says how a batch names its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ddp/core/state_dict.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/detail/batch_iterator.hpp"
#include "ddp/detail/batch_source.hpp"
#include "ddp/detail/prefetch_source.hpp"

namespace ddp {

/// A batch that the host has chosen and the device has not made yet.
struct PreparedBatch {
  /// float32 [2] whose bits are two int32: the index in the epoch's order, and the epoch.
  at::Tensor place;
  int64_t size = 0;  ///< samples
};
void for_each_tensor(PreparedBatch& batch, const TensorVisitor& visit);

/// Batches of small images that are all in GPU memory (loader.device_resident): one kernel per
/// batch, no copy, no host wait. It also makes batches inside a captured step:
///
///   ddp::GraphedStep step(ctx, parts, [&](const ddp::PreparedBatch& prepared, …) {
///     const ddp::Batch batch = images.make(prepared); …
///   });
///   for (…) { step(images.prepare(), numbers); }
///
/// A sample is the CPU's for the same (seed, epoch, index), rounded to `image_dtype`.
class DeviceImageLoader {
 public:
  virtual ~DeviceImageLoader() = default;
  /// The host's part of next(): counts the batch as consumed and, at the start of an epoch, uploads
  /// the order on the current stream, without next()'s check of epochs. Not inside a capture. Up to
  /// one epoch of batches may be prepared before make() is called for the first of them.
  virtual PreparedBatch prepare() = 0;
  /// The device's part, on the current stream. May be captured in a graph that the DataLoader
  /// outlives: each replay makes the batch at the device's current value of `place`.
  virtual Batch make(const PreparedBatch& prepared) const = 0;
};

/// For one consumer thread. The loader calls set_epoch on its own copy of the sampler. Its state
/// (ddp::Stateful) is the epoch and position that the training loop consumed. A run resumes at the
/// next batch, also with another world size or batch size.
template <typename DatasetT = Dataset, typename Collate = DefaultCollate>
class DataLoader : public Stateful {
 public:
  using BatchType = detail::BatchOf<DatasetT, Collate>;  ///< what next() returns

  /// Throws SettingsError for a sampler of another data set and for impossible batch sizes. Does
  /// not compile for unsuitable types: the message says what is missing.
  DataLoader(std::shared_ptr<DatasetT> dataset, const DistributedSampler& sampler,
             at::Device device, const LoaderOptions& options = {}, Collate collate = {})
      : dataset_(detail::checked_size(std::move(dataset), sampler)),
        source_(detail::make_batch_source(dataset_, sampler, device, options, std::move(collate))),
        batches_(sampler, options) {}

  /// Returns the next batch on the device; the next epoch follows an epoch's last batch. On CUDA
  /// the current stream, not the host, waits for the copy. Throws a batch's loading error with
  /// sample index and epoch (get_batch and collate: the first indices; data errors also name file
  /// and offset). Later calls throw the error again, until begin_epoch() or load_state_dict().
  /// In grad mode, throws SettingsError instead of a new epoch where the ranks have different
  /// numbers of batches (sampler.pad=false), because this rank would run ahead: call begin_epoch()
  /// for each epoch.
  BatchType next() {
    const auto place = source_->place();
    if (c10::GradMode::is_enabled()) {  // an evaluation's ranks wait for none of each other's steps
      batches_.require_same_epoch(begun_, place);
    }
    enter(place);
    return source_->next();
  }

  /// Jumps to the start of an epoch; does nothing if the loader is already there.
  void begin_epoch(int64_t epoch) {
    if (const auto now = source_->place(); now.epoch != epoch || now.position != 0) {
      source_->restart({epoch, 0});
    }
    begun_ = {epoch, 0};
  }

  /// Iterates over the batches left in the current epoch.
  auto begin() {
    enter(source_->place());
    return detail::BatchIterator<DataLoader>(this, batches_left());
  }
  auto end() { return detail::BatchIterator<DataLoader>(nullptr, 0); }  ///< see begin()

  int64_t epoch() const { return source_->place().epoch; }         ///< of the batch of next()
  int64_t position() const { return source_->place().position; }   ///< consumed by all ranks in it
  int64_t num_batches() const { return batches_.count_after(0); }  ///< of this rank in an epoch
  int64_t batches_left() const { return batches_.count_after(position()); }  ///< in this epoch
  /// What waits for batches cost, in total: the time in which the GPU had no work because next()
  /// had no batch; on the CPU the time in which next() waited. The host waits until the GPU has the
  /// last batch.
  double wait_ms() const { return source_->wait_ms(); }
  /// The loader of a data set in GPU memory, else nullptr.
  DeviceImageLoader* device_images() { return source_->device_images(); }
  const DatasetT& dataset() const { return *dataset_; }  ///< as given to the constructor

  std::string state_name() const override { return "loader"; }
  StateDict state_dict() const override { return batches_.state_of(source_->place()); }
  void load_state_dict(const StateDict& state) override {
    begun_ = batches_.place_in(state);
    source_->restart(begun_);
  }

 private:
  void enter(detail::LoaderPlace place) {
    if (place.epoch != begun_.epoch) {
      begun_ = place;
    }
  }

  std::shared_ptr<DatasetT> dataset_;
  std::unique_ptr<detail::BatchSource<BatchType>> source_;
  detail::EpochBatches batches_;
  detail::LoaderPlace begun_{-1, 0};  // where the epoch of next() began, or was resumed
};

}  // namespace ddp
