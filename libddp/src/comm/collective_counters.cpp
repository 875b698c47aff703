// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_counters.hpp"

#include <cuda.h>

#include <algorithm>

#include "comm/counter_kernels.hpp"
#include "comm/cuda_check.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// Through the runtime, so that nothing links against the driver's library.
void* find_write_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const auto code = cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000,
                                                     cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // not an error: the kernel does the same, a little slower
    return nullptr;
  }
  return function;
}

}  // namespace

std::string CollectiveRecord::to_string() const {
  return concat(name, " #", sequence, " (", num_elements, " ", c10::toString(dtype), ", ",
                num_bytes, " bytes)");
}

CollectiveCounters::CollectiveCounters(cudaStream_t stream) : write_value_(find_write_value()) {
  constexpr size_t kBytes = kNumCounters * sizeof(uint32_t);
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&totals_), kBytes), "cudaMalloc of the counters");
  check_cuda(cudaMemsetAsync(totals_, 0, kBytes, stream), "cudaMemsetAsync of the counters");
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&shown_), kBytes,
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc of the counters");
  std::fill_n(shown_, kNumCounters, 0U);
  // Kernels are loaded when first launched, which a capture may not allow.
  check_cuda(launch_counter_add(totals_, shown_, 0, stream), "the counter kernel");
  check_cuda(launch_counter_set(shown_, 0, stream), "the counter kernel");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

CollectiveCounters::~CollectiveCounters() {
  if (abandoned_) {
    return;
  }
  // A failure here means that the device is lost already; there is nobody to tell.
  cudaFree(totals_);
  cudaFreeHost(shown_);
}

uint32_t CollectiveCounters::read(size_t counter) const {
  return std::atomic_ref<uint32_t>(shown_[counter]).load(std::memory_order_acquire);
}

void CollectiveCounters::enqueue_eager(const std::vector<CollectiveRecord>& launched) {
  const std::lock_guard lock(mutex_);
  for (const auto& record : launched) {
    eager_records_[eager_enqueued_++ % kRecords] = record;
  }
}

void CollectiveCounters::mark_eager_end(cudaStream_t stream) {
  uint32_t value = 0;
  {
    const std::lock_guard lock(mutex_);
    value = static_cast<uint32_t>(eager_enqueued_);
  }
  if (write_value_ == nullptr) {
    check_cuda(launch_counter_set(shown_, value, stream), "the counter kernel");
    return;
  }
  const auto write =
      reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>(write_value_);
  // Mapped memory has one address for host and device (unified addressing, all 64-bit systems).
  const auto code =
      write(stream, reinterpret_cast<CUdeviceptr>(shown_), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (code != CUDA_SUCCESS) [[unlikely]] {
    throw Error(
        ExitCode::UserException,
        concat("cuStreamWriteValue32 failed with CUDA driver error ", static_cast<int>(code)));
  }
}

bool CollectiveCounters::begin_captured(unsigned long long id, cudaStream_t stream) {
  size_t graph = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!graphs_.empty() && graphs_.back().capture_id == id) {
      return false;
    }
    if (graphs_.size() == kMaxGraphs) {
      throw SettingsError(
          concat("this communicator was captured into ", kMaxGraphs,
                 " CUDA graphs; more are not counted by the watchdog: capture a step "
                 "once and replay it"));
    }
    graphs_.push_back({id, {}});
    graph = graphs_.size() - 1;
  }
  check_cuda(launch_counter_add(totals_ + started_of(graph), shown_ + started_of(graph), 1, stream),
             "the counter kernel");
  return true;
}

void CollectiveCounters::mark_captured_end(const std::vector<CollectiveRecord>& launched,
                                           cudaStream_t stream) {
  size_t graph = 0;
  {
    const std::lock_guard lock(mutex_);
    graph = graphs_.size() - 1;
    auto& records = graphs_.back().records;
    records.insert(records.end(), launched.begin(), launched.end());
  }
  check_cuda(launch_counter_add(totals_ + ended_of(graph), shown_ + ended_of(graph),
                                static_cast<uint32_t>(launched.size()), stream),
             "the counter kernel");
}

std::vector<LaneProgress> CollectiveCounters::lanes() const {
  const std::lock_guard lock(mutex_);
  std::vector<LaneProgress> lanes;
  lanes.reserve(1 + graphs_.size());
  // The GPU's numbers are 32 bits wide and wrap; their distance to what was enqueued does not.
  const auto pending = static_cast<uint32_t>(eager_enqueued_) - read(0);
  lanes.push_back({eager_enqueued_, eager_enqueued_ - pending});
  for (size_t graph = 0; graph < graphs_.size(); ++graph) {
    const uint32_t ended =
        read(ended_of(graph));  // before `started`: never more ended than started
    const uint32_t started = read(started_of(graph));
    const auto expected = static_cast<uint32_t>(started * graphs_[graph].records.size());
    lanes.push_back({uint64_t{ended} + (expected - ended), ended});
  }
  return lanes;
}

std::string CollectiveCounters::describe(const Stall& stall) const {
  const std::lock_guard lock(mutex_);
  const auto& progress = stall.progress;
  const auto counters =
      concat("completed ", progress.completed, " of ", progress.enqueued, " enqueued collectives");
  if (stall.lane == 0) {
    const auto& record = eager_records_[progress.completed % kRecords];
    return concat(record.to_string(), "; ", counters);
  }
  const auto& records = graphs_[stall.lane - 1].records;
  const auto index = progress.completed % records.size();
  return concat(records[index].to_string(), ", collective ", index + 1, " of ", records.size(),
                " captured in a CUDA graph; in its replays ", counters);
}

}  // namespace ddp::detail
