// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/collective_counters.hpp"

#include <limits>

#include "comm/cuda_check.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

CollectiveCounters::CollectiveCounters(cudaStream_t stream, cudaStream_t counter_stream)
    : stream_(stream),
      counter_stream_(counter_stream),
      memory_(kFirstOfGraphs + CapturedCollectives::kNumCounters, stream),
      eager_(memory_.shown()),
      captured_(memory_.shown() + kFirstOfGraphs) {}

CollectiveCounters::~CollectiveCounters() {
  position_source_->close();
}

int64_t CollectiveCounters::end_eager() {
  const auto launch = captured_.number_eager();
  if (eager_.end()) {
    mark_eager();
  }
  return launch;
}

void CollectiveCounters::mark_eager() {
  const std::lock_guard order(mark_mutex_);
  if (memory_.is_abandoned()) {
    return;
  }
  const auto mark = eager_.begin_mark();
  if (!mark) {
    return;
  }
  try {
    memory_.set_first(static_cast<uint32_t>(mark->value), stream_);
  } catch (...) {
    eager_.cancel_mark(*mark);
    throw;
  }
}

void CollectiveCounters::begin_captured(unsigned long long id, cudaEvent_t ready) {
  const auto graph = captured_.begin(id);
  if (!graph) {
    return;
  }
  check_cuda(cudaStreamWaitEvent(counter_stream_, ready, 0), "cudaStreamWaitEvent");
  memory_.add(kFirstOfGraphs + CapturedCollectives::started_of(*graph), 1, counter_stream_);
}

bool CollectiveCounters::count_captured(int64_t launch, cudaEvent_t ended) {
  const auto count = captured_.count(launch);
  if (!count) {
    return false;
  }
  if (count->number > 0) {
    check_cuda(cudaStreamWaitEvent(counter_stream_, ended, 0), "cudaStreamWaitEvent");
    memory_.add(kFirstOfGraphs + CapturedCollectives::ended_of(count->graph), count->number,
                counter_stream_);
  }
  return true;
}

GroupPosition CollectiveCounters::position() {
  GroupPosition position;
  if (captured_.empty()) {
    position = eager_.position();
  } else {
    position.num_called = std::numeric_limits<uint64_t>::max();
    captured_.note_progress();
  }
  position.caller.reset();  // autograd's threads make calls too
  return position;
}

std::vector<LaneProgress> CollectiveCounters::lanes() const {
  std::vector lanes{eager_.lane()};
  const auto captured = captured_.lanes();
  lanes.insert(lanes.end(), captured.begin(), captured.end());
  return lanes;
}

std::string CollectiveCounters::describe(const Stall& stall) const {
  const auto& progress = stall.progress;
  const auto counters =
      concat("completed ", progress.completed, " of ", progress.enqueued, " enqueued collectives");
  return stall.lane == 0
             ? concat(eager_.describe(progress), "; ", counters)
             : concat(captured_.describe(stall.lane - 1, progress), "; in its replays ", counters);
}

}  // namespace ddp::detail
