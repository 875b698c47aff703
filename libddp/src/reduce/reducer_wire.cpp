// SPDX-License-Identifier: Apache-2.0
// Buckets that travel without the taps that an optimizer leaves behind on all ranks
// (optimizer.skip_dead_taps): their gradients are zero.
//
// Which taps those are is agreed once, when the buckets are laid out anew. A rank whose filters are
// read in more places later cannot reduce those gradients alone, and must not drop them: it throws
// when the pass ends.
#include <c10/core/StreamGuard.h>

#include "ops/private_stream.hpp"
#include "reduce/reducer_impl.hpp"
#include "reduce/tap_agreement.hpp"

namespace ddp {

bool Reducer::Impl::may_leave_out_taps() const {
  return communicator->world_size() > 1 && !hook && !shards && !bucket_listener;
}

// What may have to travel of a gradient of this rank; optimizers leave behind the same on all.
ops::Taps Reducer::Impl::live_taps_here(size_t index) const {
  const auto* use = ops::find_tap_use(parameters[index].tensor);
  if (!may_leave_out_taps() || use == nullptr || use->keeper.expired() ||
      !detail::has_rows_of_taps(parameters[index].slot.memory)) {
    return ops::kAllTaps;
  }
  return ops::kAllTaps & ~use->left_behind;
}

// Collective.
void Reducer::Impl::agree_on_live_taps() {
  live_taps.assign(parameters.size(), ops::kAllTaps);
  std::vector<size_t> filters;
  std::vector<ops::Taps> own;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (may_leave_out_taps() && detail::is_3x3_filter(parameters[i].tensor)) {
      filters.push_back(i);
      own.push_back(live_taps_here(i));
    }
  }
  if (filters.empty()) {
    return;
  }
  const auto agreed = detail::taps_of_any_rank(*communicator, own);
  for (size_t row = 0; row < filters.size(); ++row) {
    live_taps[filters[row]] = agreed[row] == 0 ? ops::kAllTaps : agreed[row];
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
      throw detail::late_taps_error(
          parameters[i].name, ", and their gradients are not reduced",
          ", in a DistributedDataParallel made anew where the optimizer that left them out has "
          "gone");
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

// CUDA: on a stream of its own, so that neither backward nor the next buckets' launch waits for the
// reduction. finish_bucket() waits for it, and so joins it where the pass is captured.
void Reducer::Impl::unpack_live(size_t first, size_t last) {
  for (size_t b = first; b <= last; ++b) {
    if (!buckets[b].leaves_out) {
      continue;
    }
    if (!unpack_stream) {
      unpack_stream =
          ops::detail::make_private_stream(device(), ops::detail::StreamPriority::Highest);
    }
    const c10::StreamGuard guard(*unpack_stream);
    buckets[b].work->wait();
    wires[b]->unpack();
  }
}

}  // namespace ddp
