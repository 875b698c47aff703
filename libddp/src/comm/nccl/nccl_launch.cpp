// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_launch.hpp"

#include <c10/cuda/CUDAGuard.h>

#include <utility>

#include "comm/nccl/cuda_event.hpp"
#include "comm/nccl/nccl_handle.hpp"
#include "comm/thread_group.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ops/shared/private_stream.hpp"

namespace ddp::detail {

namespace {

std::shared_ptr<const WorkOrigin> make_origin(const c10::cuda::CUDAStream& stream,
                                              std::shared_ptr<const AbortState> state) {
  const auto device = stream.device_index();
  const c10::cuda::CUDAStream counter_stream(ops::detail::make_private_stream(stream.device()));
  return std::make_shared<const WorkOrigin>(WorkOrigin{
      .device = device,
      .stream = stream.stream(),
      .state = std::move(state),
      .counters = std::make_shared<CollectiveCounters>(stream.stream(), counter_stream.stream()),
      .events = std::make_shared<CudaEventPool>(),
  });
}

cudaStreamCaptureStatus capture_status_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status;
}

std::vector<CollectiveRecord> records_of(std::span<const std::shared_ptr<NcclWork>> works) {
  std::vector<CollectiveRecord> records;
  records.reserve(works.size());
  for (const auto& work : works) {
    records.push_back(work->record);
  }
  return records;
}

}  // namespace

NcclLauncher::NcclLauncher(NcclHandle& handle)
    : handle_(handle),
      stream_(ops::detail::make_private_stream({at::kCUDA, handle.device()},
                                               ops::detail::StreamPriority::Highest)),
      origin_(make_origin(stream_, handle.state())),
      ready_(origin_->events->take()) {}

void NcclLauncher::check_usable(const char* name) const {
  handle_.state()->check(name);
  refuse_while_unwinding(name);
  ThreadGroup::check(this, name);
}

cudaStreamCaptureStatus NcclLauncher::capture_status() const {
  return capture_status_of(c10::cuda::getCurrentCUDAStream(handle_.device()).stream());
}

bool NcclLauncher::begin() {
  const auto current = c10::cuda::getCurrentCUDAStream(handle_.device());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture_id = 0;
  check_cuda(cudaStreamGetCaptureInfo(current.stream(), &status, &capture_id),
             "cudaStreamGetCaptureInfo");
  const bool captured = status == cudaStreamCaptureStatusActive;
  auto& counters = *origin_->counters;
  if (captured) {
    counters.mark_eager();  // impossible after the stream is captured
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

void NcclLauncher::enqueue(const char* name, Call call) {
  const auto comm = handle_.get(name);
  const auto code = call(comm, stream_.stream());
  if (code != ncclSuccess && code != ncclInProgress) [[unlikely]] {
    handle_.state()->check(name);
    check_nccl(code, comm, name);
  }
}

WorkPtr NcclLauncher::launch(const char* name, const at::Tensor& described, KeptTensors tensors,
                             Call call, std::function<void()> after) {
  const std::lock_guard lock(mutex_);
  check_usable(name);
  const CurrentDevice device(handle_.device());
  CollectiveRecord record{
      .name = name, .sequence = next_sequence_++, .label = LabelScope::current()};
  if (described.defined()) {
    record.num_elements = described.numel();
    record.num_bytes = static_cast<int64_t>(described.nbytes());
    record.dtype = described.scalar_type();
  }
  auto work = std::make_shared<NcclWork>(origin_, record, std::move(tensors));
  work->after = std::move(after);
  const bool captured = begin();
  if (auto* recorder = TraceRecorder::active()) {
    work->trace_name = LabelScope::trace_name(name);
    work->trace_begin = recorder->mark(stream_.stream());
  }
  if (group_depth_ > 0) {
    enqueue(name, call);
    group_.push_back(work);
    return work;
  }
  if (!captured) {
    origin_->counters->begin_eager({&record, 1});
  }
  try {
    enqueue(name, call);
    finish({&work, 1}, captured);
  } catch (...) {
    if (!captured) {
      origin_->counters->cancel_eager();
    }
    throw;
  }
  return work;
}

void NcclLauncher::trace(Works works) {
  auto* recorder = TraceRecorder::active();
  if (recorder == nullptr) {
    return;
  }
  const auto end = recorder->mark(stream_.stream());
  for (const auto& work : works) {
    recorder->add_marked(work->trace_name, "communication", work->trace_begin, end);
  }
}

void NcclLauncher::finish(Works works, bool captured) {
  for (const auto& work : works) {
    if (work->after) {
      work->after();
      work->after = nullptr;
    }
  }
  trace(works);
  // The event precedes the mark, because nothing waits for a mark.
  const auto ended = std::make_shared<CudaEventPool::Event>(origin_->events->take());
  ended->record(stream_.stream());
  for (const auto& work : works) {
    work->set_launch(ended, captured);
  }
  auto& counters = *origin_->counters;
  const auto launch = captured ? counters.end_captured(records_of(works)) : counters.end_eager();
  for (const auto& work : works) {
    work->set_launch_number(launch);
  }
}

void NcclLauncher::join_counts() {
  const c10::cuda::CUDAGuard guard(handle_.device());
  const auto stream = c10::cuda::getCurrentCUDAStream(handle_.device()).stream();
  const auto status = capture_status_of(stream);
  if (origin_->counters->release_counts() && status == cudaStreamCaptureStatusActive) {
    const auto counted = origin_->events->take();
    counted.record(origin_->counters->counter_stream());
    counted.block(stream);
  }
}

void NcclLauncher::group_start() {
  mutex_.lock();
  try {
    check_usable("group_start");
    if (group_depth_ == 0) {
      check_nccl(ncclGroupStart(), nullptr, "ncclGroupStart");
    }
    ThreadGroup::enter(this);
    ++group_depth_;
  } catch (...) {
    mutex_.unlock();
    throw;
  }
}

void NcclLauncher::group_end() {
  ThreadGroup::leave();
  if (--group_depth_ == 0) {
    const auto works = std::exchange(group_, {});
    bool captured = false;
    try {
      const CurrentDevice device(handle_.device());
      captured = capture_status_of(stream_.stream()) == cudaStreamCaptureStatusActive;
      if (!captured) {
        origin_->counters->begin_eager(records_of(works));
      }
      const auto code = ncclGroupEnd();
      handle_.state()->check("group_end");
      check_nccl(code, nullptr, "ncclGroupEnd");
      if (!works.empty()) {
        finish(works, captured);
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
