// SPDX-License-Identifier: Apache-2.0
// Enqueues and counts collectives: events, groups, captures.
#include <utility>

#include "comm/nccl_communicator_impl.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

namespace {

std::vector<CollectiveRecord> records_of(std::span<const std::shared_ptr<NcclWork>> works) {
  std::vector<CollectiveRecord> records;
  records.reserve(works.size());
  for (const auto& work : works) {
    records.push_back(work->record);
  }
  return records;
}

}  // namespace

// The communicator's stream waits for the caller's enqueued work. Returns true inside a capture.
bool NcclCommunicator::begin_launch(bool shares_end) {
  const auto current = c10::cuda::getCurrentCUDAStream(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture_id = 0;
  check_cuda(cudaStreamGetCaptureInfo(current.stream(), &status, &capture_id),
             "cudaStreamGetCaptureInfo");
  const bool captured = status == cudaStreamCaptureStatusActive;
  auto& counters = *origin_->counters;
  if (captured || !shares_end) {
    origin_->ends->close();
  }
  if (captured) {
    counters.mark_eager();  // not possible once the stream is captured
  }
  if (captured || current != stream_) {
    ready_.record(current.stream());
    ready_.block(stream_.stream());
  }
  if (captured) {
    counters.begin_captured(capture_id, ready_.get());
  }
  return captured;
}

void NcclCommunicator::trace(Works works) {
  auto* recorder = TraceRecorder::active();
  if (recorder == nullptr) {
    return;
  }
  const auto end = recorder->mark(stream_.stream());
  for (const auto& work : works) {
    recorder->add_marked(work->trace_name, "communication", work->trace_begin, end);
  }
}

void NcclCommunicator::finish_launch(Works works, bool captured, bool shares_end) {
  for (const auto& work : works) {
    if (work->after) {
      work->after();
      work->after = nullptr;
    }
  }
  trace(works);
  // The result comes first: nothing waits for a mark.
  const auto ended = origin_->ends->launched(shares_end && !captured);
  for (const auto& work : works) {
    work->set_ended(ended, captured);
  }
  auto& counters = *origin_->counters;
  const auto launch = captured ? counters.end_captured(records_of(works)) : counters.end_eager();
  for (const auto& work : works) {
    work->set_launch(launch);
  }
}

void NcclCommunicator::join_counts() {
  const c10::cuda::CUDAGuard guard(device_);
  const auto stream = c10::cuda::getCurrentCUDAStream(device_).stream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (origin_->counters->release_counts() && status == cudaStreamCaptureStatusActive) {
    const auto counted = origin_->events->take();
    counted.record(origin_->counters->counter_stream());
    counted.block(stream);
  }
}

void NcclCommunicator::group_start() {
  mutex_.lock();
  try {
    check_usable("group_start");
    if (group_depth_ == 0) {
      check_nccl(ncclGroupStart(), comm_, "ncclGroupStart");
    }
    ThreadGroup::enter(this);
    ++group_depth_;
  } catch (...) {
    mutex_.unlock();
    throw;
  }
}

// Called by a destructor: each work of the group rethrows its error in wait().
void NcclCommunicator::group_end() {
  ThreadGroup::leave();
  if (--group_depth_ == 0) {
    const auto works = std::exchange(group_, {});
    bool captured = false;
    try {
      const CurrentDevice device(device_);
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      check_cuda(cudaStreamIsCapturing(stream_.stream(), &status), "cudaStreamIsCapturing");
      captured = status == cudaStreamCaptureStatusActive;
      if (!captured) {
        origin_->counters->begin_eager(records_of(works));
      }
      const auto code = ncclGroupEnd();
      state_->check("group_end");
      check_nccl(code, comm_, "ncclGroupEnd");
      if (!works.empty()) {
        finish_launch(works, captured, /*shares_end=*/false);
      }
    } catch (const std::exception& error) {
      if (!captured) {
        origin_->counters->cancel_eager();
      }
      log_error(concat("a group of ", works.size(), " collectives: ", error.what()));
      for (const auto& work : works) {
        work->failed(std::current_exception());
      }
    }
  }
  mutex_.unlock();
}

}  // namespace ddp::detail
