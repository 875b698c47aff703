// SPDX-License-Identifier: Apache-2.0
// The samples of a rank in an epoch, in order: the same indices as PyTorch's DistributedSampler.
// With `shuffle` the permutation is torch.randperm(size) of a CPU generator seeded `seed + epoch`,
// padded by repeating its head or cut (`drop_last`). Rank r takes the entries r, r + world_size,
// r + 2 * world_size, ... of this order. A position counts the entries consumed by all ranks: an
// epoch can continue at another world size.
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
  DistributedSampler(int64_t size, Membership membership, const SamplerOptions& options = {});
  DistributedSampler(int64_t size, int rank, int world_size, const SamplerOptions& options = {});

  /// Starts epoch `epoch` at position 0 with a new permutation. As in PyTorch, the order stays the
  /// same without this call. ddp::DataLoader makes it itself.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }  ///< as set_epoch() set it; 0 at first

  int64_t num_samples() const;  ///< of this rank in a whole epoch, padding included
  /// Entries of all ranks in a whole epoch: the size padded, cut or unchanged (`pad = false`).
  int64_t total_size() const;
  std::vector<int64_t> indices() const;  ///< this rank's, of the whole epoch
  /// The sample at an entry of the epoch's order, which repeats beyond the size.
  int64_t index_at(int64_t entry) const;
  /// One past the last entry if the epoch is dealt to the ranks again from entry `first` on (padded
  /// or shortened like total_size()).
  int64_t end_place(int64_t first) const;

  /// Entries of the epoch that all ranks together have consumed. set_position() deals the remaining
  /// ones again: rank r takes position + r + k * world_size.
  int64_t position() const;
  void set_position(int64_t position);  ///< see position()

  int64_t size() const { return size_; }                        ///< samples in the data set
  const Membership& membership() const { return membership_; }  ///< the ranks that share an epoch
  int rank() const { return membership_.rank; }                 ///< whose samples these are
  int world_size() const { return membership_.world_size; }     ///< ranks that share an epoch
  const SamplerOptions& options() const { return options_; }    ///< as given to the constructor

  /// Starts an epoch, with another size if given. If next() was called, this is the next epoch;
  /// otherwise the epoch and position that were set. torch::data's loaders call it at each begin().
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  /// Up to `batch_size` samples of this rank; nullopt at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;  ///< epoch and position
  void load(torch::serialize::InputArchive& archive) override;         ///< as save() wrote them

 private:
  void permute();

  int64_t size_;
  Membership membership_;
  SamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t origin_ = 0;          ///< entry at which dealing to ranks began
  int64_t taken_ = 0;           ///< samples of this rank that next() returned
  bool begun_ = false;          ///< next() was called since the epoch or the position was set
  std::vector<int64_t> order_;  ///< the permutation; empty without shuffle
};

}  // namespace ddp
