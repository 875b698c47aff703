// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_counters.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "comm/counter_kernels.hpp"
#include "comm/cuda_check.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// Uses the runtime, so that nothing links against the driver's library.
void* find_write_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const auto code = cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000,
                                                     cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // not an error: the kernel replaces it, a little slower
    return nullptr;
  }
  return function;
}

}  // namespace

std::string CollectiveRecord::to_string() const {
  return concat(name, " #", sequence, " (", num_elements, " ", c10::toString(dtype), ", ",
                num_bytes, " bytes)");
}

CollectiveCounters::CollectiveCounters(cudaStream_t stream, cudaStream_t counter_stream)
    : stream_(stream), counter_stream_(counter_stream), write_value_(find_write_value()) {
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
  constexpr size_t kBytes = kNumCounters * sizeof(uint32_t);
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&totals_), kBytes), "cudaMalloc of the counters");
  check_cuda(cudaMemsetAsync(totals_, 0, kBytes, stream), "cudaMemsetAsync of the counters");
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&shown_), kBytes,
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc of the counters");
  std::fill_n(shown_, kNumCounters, 0U);
  // Kernels are loaded at their first launch, which a capture may not allow.
  check_cuda(launch_counter_add(totals_, shown_, 0, stream), "the counter kernel");
  check_cuda(launch_counter_set(shown_, 0, stream), "the counter kernel");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

CollectiveCounters::~CollectiveCounters() {
  position_probe_->revoke();
  if (abandoned_) {
    return;
  }
  // A failure here means that the device is already lost; it cannot be reported.
  cudaFree(totals_);
  cudaFreeHost(shown_);
}

uint32_t CollectiveCounters::read(size_t counter) const {
  return std::atomic_ref<uint32_t>(shown_[counter]).load(std::memory_order_acquire);
}

void CollectiveCounters::begin_eager(std::span<const CollectiveRecord> collectives) {
  const std::lock_guard lock(mutex_);
  for (const auto& record : collectives) {
    const std::string_view name = record.name;
    const bool of_all = name != "send" && name != "recv";
    numbers_of_all_[eager_begun_ % kRecords] = of_all ? ++num_of_all_ : 0;
    mark_follows_[eager_begun_ % kRecords] = false;
    eager_records_[eager_begun_++ % kRecords] = record;
  }
}

int64_t CollectiveCounters::end_eager() {
  int64_t launch = 0;
  bool due = false;
  {
    const std::lock_guard lock(mutex_);
    launch = ++launches_;
    eager_ended_ = eager_begun_;
    mark_is_due_ = true;
    due = std::chrono::steady_clock::now() - last_mark_ >= kMarkInterval;
  }
  if (due) {
    mark_eager();
  }
  return launch;
}

void CollectiveCounters::cancel_eager() {
  const std::lock_guard lock(mutex_);
  for (; eager_begun_ != eager_ended_; --eager_begun_) {
    num_of_all_ -= numbers_of_all_[(eager_begun_ - 1) % kRecords] != 0 ? 1 : 0;
  }
}

void CollectiveCounters::mark_eager() {
  const std::lock_guard order(mark_mutex_);
  uint64_t before = 0;
  uint64_t value = 0;
  {
    const std::lock_guard lock(mutex_);
    if (eager_marked_ == eager_ended_ || abandoned_) {
      return;
    }
    before = std::exchange(eager_marked_, eager_ended_);
    mark_is_due_ = false;
    value = eager_marked_;
    mark_follows_[(value - 1) % kRecords] = true;
    last_mark_ = std::chrono::steady_clock::now();
  }
  try {
    write_mark(static_cast<uint32_t>(value));
  } catch (...) {
    // Nothing will write that number: its collectives must not look pending for ever.
    const std::lock_guard lock(mutex_);
    eager_marked_ = before;
    mark_is_due_ = true;
    mark_follows_[(value - 1) % kRecords] = false;
    throw;
  }
}

void CollectiveCounters::write_mark(uint32_t value) {
  // Any thread. The kernel needs the device to be current. The driver's call needs a context in
  // this thread, which only a runtime call creates.
  const c10::cuda::CUDAGuard guard(device_);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  if (write_value_ == nullptr) {
    check_cuda(launch_counter_set(shown_, value, stream_), "the counter kernel");
    return;
  }
  const auto write =
      reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>(write_value_);
  // Mapped memory has one address on host and device (unified addressing, all 64-bit systems).
  const auto code =
      write(stream_, reinterpret_cast<CUdeviceptr>(shown_), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (code != CUDA_SUCCESS) [[unlikely]] {
    throw Error(
        ExitCode::UserException,
        concat("cuStreamWriteValue32 failed with CUDA driver error ", static_cast<int>(code)));
  }
}

void CollectiveCounters::begin_captured(unsigned long long id, cudaEvent_t ready) {
  size_t graph = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!graphs_.empty() && graphs_.back().capture_id == id) {
      return;
    }
    if (graphs_.size() == kMaxGraphs) {
      throw SettingsError(
          concat("this communicator was captured into ", kMaxGraphs,
                 " CUDA graphs; more are not counted by the watchdog: capture a step "
                 "once and replay it"));
    }
    graphs_.push_back({id, {}, {}});
    graph = graphs_.size() - 1;
  }
  check_cuda(cudaStreamWaitEvent(counter_stream_, ready, 0), "cudaStreamWaitEvent");
  check_cuda(launch_counter_add(totals_ + started_of(graph), shown_ + started_of(graph), 1,
                                counter_stream_),
             "the counter kernel");
}

int64_t CollectiveCounters::end_captured(std::span<const CollectiveRecord> collectives) {
  const std::lock_guard lock(mutex_);
  auto& records = graphs_.back().records;
  records.insert(records.end(), collectives.begin(), collectives.end());
  return ++launches_;
}

std::vector<std::string> CollectiveCounters::captured_operations(int64_t after) const {
  std::vector<std::string> operations;
  const std::lock_guard lock(mutex_);
  for (const auto& record :
       graphs_.empty() ? std::vector<CollectiveRecord>() : graphs_.back().records) {
    if (record.sequence > after) {
      operations.push_back(
          concat(record.name, " of ", record.num_elements, ' ', c10::toString(record.dtype)));
    }
  }
  return operations;
}

bool CollectiveCounters::count_captured(int64_t launch, cudaEvent_t ended) {
  size_t graph = 0;
  size_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    if (launch != launches_) {
      return false;  // later collectives must be waited for too
    }
    graph = graphs_.size() - 1;
    auto& [id, records, counted] = graphs_.back();
    number = records.size() - (counted.empty() ? 0 : counted.back());
    if (number > 0) {
      counted.push_back(records.size());
    }
  }
  if (number > 0) {
    check_cuda(cudaStreamWaitEvent(counter_stream_, ended, 0), "cudaStreamWaitEvent");
    check_cuda(launch_counter_add(totals_ + ended_of(graph), shown_ + ended_of(graph),
                                  static_cast<uint32_t>(number), counter_stream_),
               "the counter kernel");
  }
  return true;
}

void CollectiveCounters::hold_counts() {
  const std::lock_guard lock(mutex_);
  holds_counts_ = true;
  count_is_held_ = false;
}

bool CollectiveCounters::hold_count() {
  const std::lock_guard lock(mutex_);
  count_is_held_ = count_is_held_ || holds_counts_;
  return holds_counts_;
}

bool CollectiveCounters::release_counts() {
  const std::lock_guard lock(mutex_);
  holds_counts_ = false;
  return std::exchange(count_is_held_, false);
}

// A launch inside NCCL counts too, because it may wait for a peer.
uint64_t CollectiveCounters::num_eager() const {
  return eager_begun_ == eager_ended_ ? eager_marked_ : eager_begun_;
}

// One mark may cover several collectives, starting at `first`. Returns the index of the last.
uint64_t CollectiveCounters::last_before_mark(uint64_t first, uint64_t end) const {
  auto last = first;
  while (!mark_follows_[last % kRecords] && last + 1 < end) {
    ++last;
  }
  return last;
}

GroupPosition CollectiveCounters::position() const {
  const std::lock_guard lock(mutex_);
  GroupPosition position;
  position.caller.reset();  // autograd's threads make calls too
  if (!graphs_.empty()) {
    position.num_called = std::numeric_limits<uint64_t>::max();
    return position;
  }
  position.num_called = num_of_all_;
  const auto enqueued = num_eager();
  const auto pending = static_cast<uint32_t>(enqueued) - read(0);
  if (pending != 0) {
    const auto last = last_before_mark(enqueued - pending, enqueued);
    const auto& record = eager_records_[last % kRecords];
    position.pending = numbers_of_all_[last % kRecords];
    position.operation =
        concat(record.name, " (", record.num_elements, ' ', c10::toString(record.dtype), ')');
  }
  return position;
}

std::vector<LaneProgress> CollectiveCounters::lanes() const {
  const std::lock_guard lock(mutex_);
  std::vector<LaneProgress> lanes;
  lanes.reserve(1 + graphs_.size());
  // The GPU's numbers are 32 bits wide and wrap; their distance to the enqueued number does not.
  const auto enqueued = num_eager();
  const auto pending = static_cast<uint32_t>(enqueued) - read(0);
  lanes.push_back({enqueued, enqueued - pending});
  for (size_t graph = 0; graph < graphs_.size(); ++graph) {
    const uint32_t ended =
        read(ended_of(graph));  // read before `started`, so `ended` never exceeds it
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
  // One mark may cover several collectives: any of them may have failed to end.
  const auto one_of = [](const CollectiveRecord& first, const CollectiveRecord& last) {
    return first.sequence == last.sequence
               ? first.to_string()
               : concat("one of ", first.to_string(), " to ", last.to_string());
  };
  if (stall.lane == 0) {
    const auto first = progress.completed;
    const auto last = last_before_mark(first, progress.enqueued);
    return concat(one_of(eager_records_[first % kRecords], eager_records_[last % kRecords]), "; ",
                  counters);
  }
  const auto& [id, records, counted] = graphs_[stall.lane - 1];
  const auto first = progress.completed % records.size();
  const auto last = *std::upper_bound(counted.begin(), counted.end(), first) - 1;
  return concat(one_of(records[first], records[last]), ", collective ", first + 1,
                last == first ? "" : concat(" to ", last + 1), " of ", records.size(),
                " captured in a CUDA graph; in its replays ", counters);
}

}  // namespace ddp::detail
