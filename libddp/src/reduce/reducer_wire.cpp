// SPDX-License-Identifier: Apache-2.0
// Buckets that travel without the taps that an optimizer leaves behind on all ranks
// (optimizer.skip_dead_taps): their gradients are zero.
//
// Which taps those are is agreed once, when the buckets are laid out anew. A rank whose filters are
// read in more places later cannot reduce those gradients alone, and must not drop them: it throws
// when the pass ends.
#include <ATen/ATen.h>

#include "ddp/core/error.hpp"
#include "reduce/reducer_impl.hpp"

namespace ddp {

// What may have to travel of a gradient of this rank; optimizers leave behind the same on all.
ops::Taps Reducer::Impl::live_taps_here(size_t index) const {
  const bool may_leave_out = communicator->world_size() > 1 && !hook && !shards && !bucket_listener;
  const auto* use = ops::find_tap_use(parameters[index].tensor);
  if (!may_leave_out || use == nullptr ||
      !detail::has_rows_of_taps(parameters[index].slot.memory)) {
    return ops::kAllTaps;
  }
  return ops::kAllTaps & ~use->left_behind;
}

// Collective.
void Reducer::Impl::agree_on_live_taps() {
  live_taps.assign(parameters.size(), ops::kAllTaps);
  const bool may_leave_out = communicator->world_size() > 1 && !hook && !shards && !bucket_listener;
  const auto is_filter = [](const at::Tensor& tensor) {
    return tensor.dim() == 4 && tensor.size(2) == 3 && tensor.size(3) == 3;
  };
  std::vector<int> filters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (may_leave_out && is_filter(parameters[i].tensor)) {
      filters.push_back(static_cast<int>(i));
    }
  }
  if (filters.empty()) {
    return;
  }
  auto live = at::ones({static_cast<int64_t>(filters.size()), 9}, at::kInt);
  for (size_t row = 0; row < filters.size(); ++row) {
    const ops::Taps own = live_taps_here(static_cast<size_t>(filters[row]));
    for (int64_t tap = 0; tap < 9; ++tap) {
      live[static_cast<int64_t>(row)][tap] = (own >> tap) & 1;
    }
  }
  live = live.to(device());
  communicator->all_reduce(live, ReduceOp::Max)->wait();
  live = live.cpu();
  const auto agreed = live.accessor<int, 2>();
  for (size_t row = 0; row < filters.size(); ++row) {
    ops::Taps taps = 0;
    for (int tap = 0; tap < 9; ++tap) {
      taps |= static_cast<ops::Taps>(agreed[static_cast<int64_t>(row)][tap] << tap);
    }
    live_taps[static_cast<size_t>(filters[row])] = taps == 0 ? ops::kAllTaps : taps;
  }
}

// Collective.
void Reducer::Impl::make_wires() {
  wires.clear();
  for (size_t b = 0; b < buckets.size(); ++b) {
    std::vector<ops::Taps> live;
    for (const int index : layout.buckets[b].parameters) {
      live.push_back(live_taps[static_cast<size_t>(index)]);
    }
    wires.push_back(detail::LiveWire::make(buckets[b].bucket, live));
  }
}

// In the running pass. A listener reads the bucket as soon as the reduction ended, and gets all of
// it.
bool Reducer::Impl::leaves_out_taps(size_t index) const {
  return index < wires.size() && wires[index].has_value() && !bucket_listener;
}

// At the end of a pass, so that the other ranks' reductions found this rank's.
void Reducer::Impl::refuse_late_taps() const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto bucket = static_cast<size_t>(layout.places[i].bucket);
    const auto* use = ops::find_tap_use(parameters[i].tensor);
    if (buckets[bucket].leaves_out && use != nullptr && (use->used & ~live_taps[i]) != 0) {
      throw SettingsError(
          "optimizer.skip_dead_taps=true: taps of " + parameters[i].name +
          " that no rank had read when the first step was made are read since, as over larger "
          "images, and their gradients are not reduced: make the first step over the largest "
          "images, evaluate under torch::NoGradGuard, or set it to false, in a "
          "DistributedDataParallel made anew where the optimizer that left them out has gone");
    }
  }
}

void Reducer::Impl::pack_live(size_t first, size_t last) {
  for (size_t b = first; b <= last; ++b) {
    buckets[b].leaves_out = leaves_out_taps(b);
    if (buckets[b].leaves_out) {
      wires[b]->pack();
    }
  }
}

// CUDA: on the stream that launched them, so that backward does not wait.
void Reducer::Impl::unpack_live(size_t first, size_t last) const {
  for (size_t b = first; b <= last; ++b) {
    if (buckets[b].leaves_out) {
      buckets[b].work->wait();
      wires[b]->unpack();
    }
  }
}

}  // namespace ddp
