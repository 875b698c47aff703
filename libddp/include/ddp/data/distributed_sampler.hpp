// SPDX-License-Identifier: Apache-2.0
// Which samples a rank sees in an epoch, in which order: PyTorch's DistributedSampler, index for
// index (torch/utils/data/distributed.py): with `shuffle` the permutation is torch.randperm(size)
// of a CPU generator seeded `seed + epoch`; it is padded by repeating its head (cyclically), or cut
// with `drop_last`; rank r takes the places r, r + world_size, r + 2 * world_size, …
//
// Beyond Python's: `pad = false` gives each sample to exactly one rank (evaluation); a position
// that counts the places all ranks have consumed, so that an epoch goes on at another world size
// with each sample seen once.
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
  /// Of a data set of `size` samples. Throws SettingsError for a negative size or an impossible
  /// rank.
  DistributedSampler(int64_t size, const CommunicatorPtr& communicator,
                     const SamplerOptions& options = {});
  DistributedSampler(int64_t size, int rank, int world_size, const SamplerOptions& options = {});

  /// Starts epoch `epoch`: its permutation, position 0. As in PyTorch the order stays the same
  /// where nobody calls this or reset(). A ddp::DataLoader calls it by itself.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }

  /// Samples of this rank in a whole epoch, padding included.
  int64_t num_samples() const;
  /// Places of all ranks in a whole epoch: size padded, cut, or as it is (`pad = false`).
  int64_t total_size() const;
  /// This rank's samples of the whole epoch, wherever the position is.
  std::vector<int64_t> indices() const;

  /// The sample at a place of the epoch's order; places beyond the size repeat it cyclically.
  int64_t index_at(int64_t place) const;
  /// The end of the places that remain after `first`: as total_size(), counted from there.
  int64_t end_place(int64_t first) const;

  /// Places of the epoch that all ranks have consumed together. Setting it decodes nothing; what
  /// remains is dealt anew: rank r takes position + r, position + r + world_size, …
  int64_t position() const;
  void set_position(int64_t position);

  int64_t size() const { return size_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const SamplerOptions& options() const { return options_; }

  /// torch::data::samplers::Sampler<>: the start of an epoch, with another size if given. After
  /// next() that is the following epoch; before it everything stays, so that an epoch and a
  /// position that were set hold. torch::data's loaders call this at each begin() on a copy of
  /// their own: each begin() has a new order, and set_epoch() on the original does not reach the
  /// copy.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  /// The next up to `batch_size` samples of this rank; nothing at the end of the epoch.
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
  int64_t origin_ = 0;          ///< where dealing to ranks began
  int64_t taken_ = 0;           ///< samples of this rank that next() gave
  bool begun_ = false;          ///< next() was called since the epoch or the position was set
  std::vector<int64_t> order_;  ///< the permutation; empty without shuffle
};

}  // namespace ddp
