// SPDX-License-Identifier: Apache-2.0
#include "data/loader/batch_plan.hpp"

#include <algorithm>
#include <variant>

#include "ddp/core/error.hpp"
#include "ddp/detail/batch_source.hpp"

namespace ddp::detail {

namespace {

// The number of places of the batch at `position`; 0 if there is none.
int64_t batch_extent(const DistributedSampler& sampler, int64_t position, int64_t global_batch_size,
                     bool drop_last) {
  const int64_t remaining = sampler.size() - position;
  if (remaining >= global_batch_size) {
    return global_batch_size;
  }
  const int64_t extent = std::min(sampler.end_place(position) - position, global_batch_size);
  return drop_last && extent < global_batch_size ? 0 : extent;
}

// Throws for a rank without samples, which no batch size can fix.
[[noreturn]] void fail_without_sample(const DistributedSampler& sampler) {
  if (sampler.size() == 0) {
    throw SettingsError("DataLoader: the data set is empty");
  }
  const SamplerOptions& options = sampler.options();
  throw SettingsError(concat(
      "DataLoader: ", sampler.size(), " samples leave none for rank ", sampler.rank(), " of ",
      sampler.world_size(), " with sampler.drop_last=", options.drop_last ? "true" : "false",
      " and sampler.pad=", options.pad ? "true" : "false",
      "; fix: ", options.drop_last ? "sampler.drop_last=false, " : "",
      options.pad ? "" : "sampler.pad=true, ", "at most ", sampler.size(), " ranks, or more data"));
}

int64_t global_batch_size(const DistributedSampler& sampler, const LoaderOptions& options) {
  return options.global_batch_size > 0 ? options.global_batch_size
                                       : options.batch_size * sampler.world_size();
}

void check_loader_options(const DistributedSampler& sampler, const LoaderOptions& options) {
  if (options.batch_size < 1) {
    throw SettingsError(concat("loader.batch_size=", options.batch_size, " must be at least 1"));
  }
  if (options.global_batch_size < 0 ||
      (options.global_batch_size > 0 && options.global_batch_size < sampler.world_size())) {
    throw SettingsError(concat("loader.global_batch_size=", options.global_batch_size,
                               " is smaller than the ", sampler.world_size(),
                               " ranks that share it; fix: use fewer ranks, or a larger batch"));
  }
  if (options.num_workers < 0 || options.prefetch_batches < 1) {
    throw SettingsError(
        concat("loader.num_workers=", options.num_workers, " must be at least 0 and ",
               "loader.prefetch_batches=", options.prefetch_batches, " at least 1"));
  }
}

// A copy of `sampler` without the permutation, for counting.
DistributedSampler without_permutation(const DistributedSampler& sampler) {
  SamplerOptions options = sampler.options();
  options.shuffle = false;
  return {sampler.size(), sampler.membership(), options};
}

}  // namespace

std::optional<BatchPlan> plan_batch(const DistributedSampler& sampler, int64_t position,
                                    int64_t global_batch_size, bool drop_last) {
  const int64_t extent = batch_extent(sampler, position, global_batch_size, drop_last);
  if (extent <= 0) {
    return std::nullopt;
  }
  BatchPlan plan{position, position + extent, {}};
  for (int64_t place = position + sampler.rank(); place < plan.end; place += sampler.world_size()) {
    plan.indices.push_back(sampler.index_at(place));
  }
  return plan;
}

int64_t count_batches(const DistributedSampler& sampler, int64_t position,
                      int64_t global_batch_size, bool drop_last) {
  const int64_t remaining = std::max<int64_t>(sampler.size() - position, 0);
  const int64_t full = remaining / global_batch_size;
  const int64_t tail =
      batch_extent(sampler, position + full * global_batch_size, global_batch_size, drop_last);
  return full + (tail > sampler.rank() ? 1 : 0);
}

EpochPlan plan_epoch(DistributedSampler& sampler, int64_t epoch, int64_t position,
                     int64_t global_batch_size, bool drop_last) {
  if (sampler.epoch() != epoch) {
    sampler.set_epoch(epoch);
  }
  EpochPlan plan{.epoch = epoch, .indices = {}, .batches = {}};
  while (const auto batch = plan_batch(sampler, position, global_batch_size, drop_last)) {
    if (batch->indices.empty()) {
      break;
    }
    for (int64_t index : batch->indices) {
      plan.indices.push_back(static_cast<int32_t>(index));
    }
    position = batch->end;
    plan.batches.push_back({static_cast<int64_t>(batch->indices.size()), position});
  }
  return plan;
}

EpochBatches::EpochBatches(const DistributedSampler& sampler, const LoaderOptions& options)
    : shape_(without_permutation(sampler)),
      shuffle_(sampler.options().shuffle),
      drop_last_(options.drop_last),
      global_size_(global_batch_size(sampler, options)) {
  check_loader_options(sampler, options);
  options.usage.record(global_size_);
}

int64_t EpochBatches::max_size() const {
  return (global_size_ + shape_.world_size() - 1) / shape_.world_size();
}

int64_t EpochBatches::count_after(int64_t position) const {
  return count_batches(shape_, position, global_size_, drop_last_);
}

void EpochBatches::require_same_epoch(LoaderPlace begun, LoaderPlace place) const {
  if (begun.epoch < 0 || place.epoch == begun.epoch) {
    return;
  }
  const int64_t left = std::max<int64_t>(shape_.size() - begun.position, 0);
  const int64_t last = batch_extent(shape_, begun.position + left / global_size_ * global_size_,
                                    global_size_, drop_last_);
  if (last > 0 && last < shape_.world_size()) {
    throw SettingsError(concat(
        "DataLoader::next() would begin epoch ", place.epoch,
        ", but with sampler.pad=false and loader.drop_last=false the last batch of this epoch has "
        "samples for ",
        last, " of ", shape_.world_size(),
        " ranks, so the others would run ahead; fix: set one of them to true, loop over the loader "
        "(for (auto& batch : loader)), or train inside ddp::join and call begin_epoch() for each "
        "epoch"));
  }
}

void EpochBatches::fail_without_batch() const {
  if (shape_.num_samples() == 0) {
    fail_without_sample(shape_);
  }
  throw SettingsError(concat("DataLoader: an epoch of ", shape_.size(), " samples on ",
                             shape_.world_size(), " ranks holds no batch of ", global_size_,
                             " for rank ", shape_.rank(),
                             "; fix: reduce loader.batch_size, or set loader.drop_last=false"));
}

StateDict EpochBatches::state_of(LoaderPlace place) const {
  StateDict result;
  result.values = {{"epoch", place.epoch},
                   {"position", place.position},
                   {"size", shape_.size()},
                   {"seed", shape_.options().seed},
                   {"shuffle", shuffle_}};
  return result;
}

LoaderPlace EpochBatches::place_in(const StateDict& state) const {
  const StateDict own = state_of({});
  for (const auto& [key, value] : own.values) {
    const auto found = state.values.find(key);
    if (found == state.values.end()) {
      throw MismatchError(concat("loader state: key ", key, " is missing"));
    }
    if (found->second.index() != value.index()) {
      throw MismatchError(concat("loader state: key ", key, " has another type"));
    }
    if (key != "epoch" && key != "position" && found->second != value) {
      const auto text = [](const StateValue& v) {
        return std::visit([](const auto& x) { return concat(x); }, v);
      };
      throw MismatchError(concat("loader state: ", key, " was ", text(found->second),
                                 " and now is ", text(value),
                                 ": the order of samples cannot continue where it stopped"));
    }
  }
  for (const auto& [key, value] : state.values) {
    if (!own.values.contains(key)) {
      throw MismatchError(concat("loader state: key ", key, " is unexpected"));
    }
  }
  const auto epoch = std::get<int64_t>(state.values.at("epoch"));
  const auto position = std::get<int64_t>(state.values.at("position"));
  if (epoch < 0 || position < 0) {
    throw MismatchError(concat("loader state: epoch ", epoch, ", position ", position));
  }
  return {epoch, position};
}

}  // namespace ddp::detail
