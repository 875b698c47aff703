// SPDX-License-Identifier: Apache-2.0
// The interface behind DataLoader. make_batch_source() (src/data/make_batch_source.cpp) chooses the
// implementation for the library's data sets.
#pragma once

#include <cstdint>

#include "ddp/core/state_dict.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/options.hpp"

namespace ddp {
class DeviceImageLoader;
}

namespace ddp::detail {

/// A place in the stream of batches.
struct LoaderPlace {
  int64_t epoch = 0;
  int64_t position = 0;  ///< places of the epoch's order consumed by all ranks together
};

/// Makes batches in the sampler's order. For one consumer thread.
template <typename BatchT>
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// The next batch, on the device. The current stream, not the host, waits for copies. If the
  /// device has no memory for a batch, this throws, and the next call returns the same batch.
  virtual BatchT next() = 0;
  /// Continues at `place`, without batches made ahead and without their errors.
  virtual void restart(LoaderPlace place) = 0;
  /// The place of the batch that next() returns.
  virtual LoaderPlace place() const = 0;
  /// See DataLoader::wait_ms().
  virtual double wait_ms() const = 0;
  /// See DataLoader::device_images().
  virtual DeviceImageLoader* device_images() { return nullptr; }
};

/// Size and number of a rank's batches, and a place among them in a checkpoint.
class EpochBatches {
 public:
  /// Throws SettingsError for impossible batch sizes and numbers of workers.
  EpochBatches(const DistributedSampler& sampler, const LoaderOptions& options);

  /// Samples of all ranks in a batch.
  int64_t global_size() const { return global_size_; }
  /// Largest number of this rank's samples in a batch.
  int64_t max_size() const;
  /// This rank's batches in an epoch after `position`.
  int64_t count_after(int64_t position) const;
  /// Throws SettingsError if `place` is in another epoch than `begun` and the ranks had different
  /// numbers of batches from `begun` to the end of its epoch. Epoch -1: not begun.
  void require_same_epoch(LoaderPlace begun, LoaderPlace place) const;
  /// Throws SettingsError with reason and fix when an epoch holds no batch for this rank.
  [[noreturn]] void fail_without_batch() const;

  StateDict state_of(LoaderPlace place) const;
  /// Throws MismatchError if the state belongs to another order of samples.
  LoaderPlace place_in(const StateDict& state) const;

 private:
  DistributedSampler shape_;  // without the permutation: for counting
  bool shuffle_;
  bool drop_last_;
  int64_t global_size_;
};

}  // namespace ddp::detail
