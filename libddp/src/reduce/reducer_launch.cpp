// SPDX-License-Identifier: Apache-2.0
// The launch of full buckets: which stream waits for their gradients, and how they are reduced.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "ddp/ops/autocast_off.hpp"
#include "ops/private_stream.hpp"
#include "reduce/reducer_impl.hpp"

namespace ddp {

// Called in the agreed order, possibly by another model's hook. Buckets of one launch number wait
// for the last of them.
void Reducer::Impl::launch(int index) {
  const auto last = static_cast<size_t>(index);
  const int number = layout.buckets[last].launch;
  if (last + 1 < buckets.size() && layout.buckets[last + 1].launch == number) {
    return;
  }
  size_t first = last;
  while (first > 0 && layout.buckets[first - 1].launch == number) {
    --first;
  }
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(device().type());
  const TraceLabel label("bucket", index);
  if (first == 0 && is_measured) {
    comm_start.record(device());
  }
  if (requires_weight && !is_weighted) {
    throw SettingsError(
        "join: JoinOptions::weighted=true, but the loop called loss.backward(): call "
        "model.weighted_backward(loss_sum, count), or leave JoinOptions::weighted out");
  }
  if (device().is_cpu()) {
    start_reductions(first, last);
  } else {
    const c10::StreamGuard guard(stream_behind_gradients(first, last));
    start_reductions(first, last);
  }
  if (buckets[last].bucket.is_last) {
    launch_used_map();
  }
}

// A stream behind all gradients of these buckets. Where they were written beside backward it is one
// of its own, so that the reduction waits for them and backward does not:
//
//   compute stream | dgrad 3 | dgrad 2 | dgrad 1 | ...
//   side stream         | wgrad 3  | wgrad 2 | ...
//   launch stream                  | waits: bucket of 3 | ...
//
// A hook's kernels stay on the current stream, with the memory that they take.
c10::Stream Reducer::Impl::stream_behind_gradients(size_t first, size_t last) {
  const auto current = detail::current_stream(device());
  std::vector<c10::Stream> others;
  for (size_t b = first; b <= last; ++b) {
    for (const auto* streams : {&buckets[b].streams, &buckets[b].writers}) {
      std::copy_if(streams->begin(), streams->end(), std::back_inserter(others),
                   [&](const c10::Stream& stream) { return stream != current; });
    }
  }
  auto behind = current;
  if (!others.empty() && !hook) {
    if (!launch_stream) {
      launch_stream =
          ops::detail::make_private_stream(device(), ops::detail::StreamPriority::Highest);
    }
    behind = *launch_stream;
    launched_beside = true;
    detail::wait_for(current, behind);
  }
  for (const auto& stream : others) {
    detail::wait_for(stream, behind);
  }
  return behind;
}

// A backward that an exception ended left its reductions on the launch stream. A captured pass
// cannot wait for them: who captures calls finish_pending() first.
void Reducer::Impl::join_broken_pass() {
  if (std::exchange(launched_beside, false) && !detail::is_capturing(device())) {
    detail::wait_for(*launch_stream, detail::current_stream(device()));
  }
}

void Reducer::Impl::start_reductions(size_t first, size_t last) {
  std::optional<GroupScope> group(std::in_place, *communicator);
  // The sum of weights rides in the launch of the first bucket.
  if (first == 0 && is_weighted) {
    weight_sum.fill_(weight);
    if (device_weight.defined()) {
      if (!device().is_cpu()) {
        detail::wait_for(*weight_stream, detail::current_stream(device()));
      }
      weight_sum.add_(device_weight);
    }
    weight_work = communicator->all_reduce(weight_sum, ReduceOp::Sum);
  }
  if (hook && !hook->starts_in_group()) {
    group.reset();
  }
  const auto op = scales_after_sum() ? ReduceOp::Sum : ReduceOp::Avg;
  const bool is_tail = last + 1 == buckets.size();  // all before are hidden behind the backward
  for (size_t b = first; b <= last; ++b) {
    auto& bucket = buckets[b].bucket;
    bucket.divisor = divisor != 0 ? divisor : communicator->world_size();
    bucket.inverse_divisor = is_weighted ? weight_sum : at::Tensor();
    bucket.is_tail = is_tail;
    if (hook) {
      hook->start(bucket);
    } else if (shards) {
      buckets[b].work = communicator->reduce_scatter(bucket.shard, bucket.buffer, op);
    } else {
      buckets[b].work = is_tail ? communicator->all_reduce(bucket.buffer, op)
                                : communicator->all_reduce_overlapped(bucket.buffer, op);
    }
  }
}

}  // namespace ddp
