// SPDX-License-Identifier: Apache-2.0
// The communicator's construction, watchdog, children, ordered end and abort.
#include <algorithm>
#include <utility>

#include "comm/nccl_communicator_impl.hpp"
#include "core/running_clock.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ops/private_stream.hpp"

namespace ddp::detail {

using namespace std::chrono_literals;

namespace {

// A collective with at most this many thread blocks leaves room for kernels that need all their
// multiprocessors at once.
constexpr int64_t kMostReserved = 24;

std::shared_ptr<const WorkOrigin> make_origin(const c10::cuda::CUDAStream& stream,
                                              std::shared_ptr<const AbortState> state) {
  const auto device = stream.device_index();
  const c10::cuda::CUDAStream counter_stream(ops::detail::make_private_stream(stream.device()));
  auto events = std::make_shared<CudaEventPool>();
  auto record = [events, stream] {
    const CurrentDevice current(stream.device_index());
    auto event = events->take();
    event.record(stream.stream());
    return event;
  };
  return std::make_shared<const WorkOrigin>(WorkOrigin{
      .device = device,
      .stream = stream.stream(),
      .state = std::move(state),
      .counters = std::make_shared<CollectiveCounters>(stream.stream(), counter_stream.stream()),
      .events = std::move(events),
      .ends = std::make_shared<NcclLaunchEnds>(std::move(record)),
  });
}

}  // namespace

NcclCommunicator::NcclCommunicator(ncclComm_t comm, c10::DeviceIndex device,
                                   const CommunicatorOptions& options,
                                   CollectiveFailureHandler on_failure,
                                   std::shared_ptr<std::atomic<int64_t>> step,
                                   std::string no_windows, std::shared_ptr<CollectiveCheck> check)
    : comm_(comm),
      device_(device),
      options_(options),
      on_failure_(std::move(on_failure)),
      check_(std::move(check)),
      step_(std::move(step)),
      stream_(ops::detail::make_private_stream({at::kCUDA, device},
                                               ops::detail::StreamPriority::Highest)),
      origin_(make_origin(stream_, state_)),
      ready_(origin_->events->take()),
      no_windows_(std::move(no_windows)) {
  check_nccl(ncclCommUserRank(comm_, &rank_), comm_, "ncclCommUserRank");
  check_nccl(ncclCommCount(comm_, &world_size_), comm_, "ncclCommCount");
  if (options_.nccl_algorithm != "ring" && no_windows_.empty() && world_size_ > 1) {
    memory_ = std::make_shared<NcclMemory>(comm_, device_);
  }
  if (world_size_ > 1 && options_.nccl_max_ctas > 0 && options_.nccl_max_ctas <= kMostReserved) {
    reservation_.emplace(static_cast<int>(options_.nccl_max_ctas));
  }
}

void NcclCommunicator::start_watchdog() {
  const auto interval = std::clamp<std::chrono::milliseconds>(
      std::min(options_.timeout, options_.first_step_timeout) / 10, 10ms, 1000ms);
  watchdog_ = std::make_unique<Watchdog<std::function<bool()>>>(
      [weak = weak_from_this()] {
        const auto self = weak.lock();
        return self != nullptr && self->look();
      },
      interval);
}

void NcclCommunicator::tell_positions(std::string id, const WatchPosition& watch) {
  id_ = std::move(id);
  watch_ = watch;
  if (!watch_) {
    return;
  }
  watch_([id = id_, probe = origin_->counters->position_probe()] {
    auto position = probe->read();
    if (position) {
      position->id = id;
    }
    return position;
  });
}

NcclCommunicator::~NcclCommunicator() {
  watchdog_.reset();
  try {
    end_nccl();
  } catch (const std::exception& error) {
    log_error(concat("at the end of the nccl communicator: ", error.what()));
  }
}

// Frees the NCCL communicator unless an abort did.
void NcclCommunicator::end_nccl() {
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard lock(handle_mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr) {
    return;
  }
  if (memory_) {
    memory_->close();
  }
  auto code = std::make_shared<std::atomic<ncclResult_t>>(ncclSuccess);
  if (!run_bounded(30s, [comm, code, device = device_] {
        cudaSetDevice(device);
        code->store(ncclCommDestroy(comm));
      })) {
    log_warning(
        "ncclCommDestroy did not end within 30 s; destroy the CUDA graphs that captured "
        "collectives before their communicator");
    origin_->counters->abandon();  // such a graph writes them in its next replay
    return;
  }
  check_nccl(code->load(), nullptr, "ncclCommDestroy");
}

// Called by the watchdog: checks for stalled counters, then for NCCL's own errors. Returns false
// when no further check is needed.
bool NcclCommunicator::look() {
  if (const auto stall =
          stalls_.look(origin_->counters->lanes(), std::chrono::steady_clock::now(), limit())) {
    const auto what = concat(origin_->counters->describe(*stall),
                             " of the nccl communicator, rank ", rank_, " of ", world_size_);
    fail(what, concat(what, ": no collective ended for ", stall->stood.count(),
                      " ms: a peer is lost, stuck, or makes other calls than this rank"));
    return false;
  }
  ncclResult_t code = ncclSuccess;
  {
    const std::lock_guard lock(handle_mutex_);
    if (comm_ == nullptr || state_->aborted()) {
      return false;
    }
    if (ncclCommGetAsyncError(comm_, &code) != ncclSuccess) {
      code = ncclInternalError;
    }
  }
  if (code == ncclSuccess || code == ncclInProgress) {
    return true;
  }
  try {
    check_nccl(code, nullptr, "a collective of the nccl communicator");
  } catch (const std::exception& error) {
    fail("a collective of the nccl communicator", error.what());
  }
  return false;
}

void NcclCommunicator::fail(const std::string& collective, const std::string& message) {
  if (state_->aborted()) {
    return;
  }
  log_error(message);
  // Peers are notified before this rank throws.
  if (on_failure_) {
    on_failure_({collective, step_->load(), std::make_exception_ptr(PeerLostError(message))});
  }
  abort(message);
}

void NcclCommunicator::abort(const std::string& reason) {
  if (!state_->abort(reason)) {
    return;
  }
  // A launching thread can block inside NCCL. Setting NCCL's abort flag unblocks it.
  const std::unique_lock launching(mutex_, 1s);
  std::vector<std::weak_ptr<Communicator>> children;
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard lock(handle_mutex_);
    comm = std::exchange(comm_, nullptr);
    children = children_;
  }
  origin_->counters->abandon();
  if (memory_) {
    memory_->abandon();
  }
  if (comm != nullptr && !run_bounded(5s, [comm, device = device_] {
        cudaSetDevice(device);
        ncclCommAbort(comm);
      })) {
    log_error("ncclCommAbort did not end within 5 s; its thread is left behind");
  }
  for (const auto& weak : children) {
    if (const auto child = weak.lock()) {
      child->abort(reason);
    }
  }
}

CommunicatorPtr NcclCommunicator::split(int color, int key) {
  const int64_t call_number = compare("split");
  const std::lock_guard lock(mutex_);
  check_usable("split");
  const c10::cuda::CUDAGuard guard(device_);
  const auto bound = limit();
  RunningLimit running_limit(bound);
  const auto split_number = ++num_splits_;
  ncclComm_t child = split_nccl(comm_, device_, color, key, options_, [&] {
    state_->check("split");
    if (running_limit.is_over()) {
      throw PeerLostError(concat("split did not end within ", bound.count(),
                                 " ms: a peer is lost, stuck, or did not call it"));
    }
  });
  if (child == nullptr) {
    return nullptr;
  }
  int num_ranks = 0;
  check_nccl(ncclCommCount(child, &num_ranks), child, "ncclCommCount");
  auto made = std::make_shared<NcclCommunicator>(
      child, device_, options_, on_failure_, step_, no_windows_,
      check_ ? check_->of_group(call_number, color, num_ranks) : nullptr);
  made->share_launch_sequencer_of(*this);
  made->start_watchdog();
  made->tell_positions(concat(id_, "/", split_number, ":", color), watch_);
  const std::lock_guard handle_lock(handle_mutex_);
  std::erase_if(children_, [](const auto& other) { return other.expired(); });
  children_.push_back(made);
  if (state_->aborted()) {  // the concurrent abort did not see this child
    made->abort("the communicator it was split from was aborted");
    state_->check("split");
  }
  return made;
}

}  // namespace ddp::detail
