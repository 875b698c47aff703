// SPDX-License-Identifier: Apache-2.0
// The samples of a rank in an epoch, in order: the same indices as PyTorch's DistributedSampler.
// With `shuffle` the permutation is torch.randperm(size) of a CPU generator seeded `seed + epoch`,
// padded by repeating its head or cut (`drop_last`). Rank r takes places r + k * world_size. A
// position counts the places consumed by all ranks: an epoch can continue at another world size.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/data/options.hpp"

namespace ddp {

class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// For a data set of `size` samples. Throws SettingsError for a negative size or an invalid rank.
  DistributedSampler(int64_t size, const CommunicatorPtr& communicator,
                     const SamplerOptions& options = {});
  DistributedSampler(int64_t size, int rank, int world_size, const SamplerOptions& options = {});

  /// Starts epoch `epoch` at position 0 with a new permutation. As in PyTorch, the order stays the
  /// same without this call. ddp::DataLoader makes it itself.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }

  /// Samples of this rank in a whole epoch, padding included.
  int64_t num_samples() const;
  /// Places of all ranks in a whole epoch: the size padded, cut or unchanged (`pad = false`).
  int64_t total_size() const;
  /// This rank's samples of the whole epoch, independent of the position.
  std::vector<int64_t> indices() const;
  /// The sample at a place of the epoch's order; places beyond the size repeat it cyclically.
  int64_t index_at(int64_t place) const;
  /// The end of the places that remain after `first`: as total_size(), counted from `first`.
  int64_t end_place(int64_t first) const;

  /// Places of the epoch that all ranks together have consumed. set_position() deals the remaining
  /// places again: rank r takes position + r + k * world_size.
  int64_t position() const;
  void set_position(int64_t position);

  int64_t size() const { return size_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const SamplerOptions& options() const { return options_; }

  /// The start of an epoch, with another size if given: after next() the following epoch, else the
  /// epoch and position that were set. torch::data's loaders call it at each begin(), on their own
  /// copy.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  /// Returns up to `batch_size` next samples of this rank; nullopt at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void permute();

  int64_t size_;
  int rank_;
  int world_size_;
  SamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t origin_ = 0;          ///< place at which dealing to ranks began
  int64_t taken_ = 0;           ///< samples of this rank that next() returned
  bool begun_ = false;          ///< next() was called since the epoch or the position was set
  std::vector<int64_t> order_;  ///< the permutation; empty without shuffle
};

}  // namespace ddp
