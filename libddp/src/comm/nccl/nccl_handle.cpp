// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_handle.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <utility>

#include "core/control/failure/failure_cause.hpp"
#include "core/control/running_clock.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

using namespace std::chrono_literals;

constexpr int kDefaultMaxCtas = 32;

const char* hint_of(ncclResult_t code) {
  switch (code) {
    case ncclUnhandledCudaError:
      return "a CUDA call inside NCCL failed: often an earlier kernel's error, or the device has "
             "no "
             "memory left";
    case ncclSystemError:
      return "a system call failed; fix: check NCCL_SOCKET_IFNAME, the size of /dev/shm and "
             "ulimit -l; NCCL_DEBUG=INFO logs more";
    case ncclRemoteError:
      return "a peer left or its network broke";
    case ncclInvalidUsage:
      return "often two ranks on one GPU, or ranks that run different NCCL versions";
    case ncclInvalidArgument:
      return "libddp checks arguments before NCCL does; fix: report this as a bug";
    default:
      return "NCCL_DEBUG=INFO logs more";
  }
}

ncclConfig_t make_config(const CommunicatorOptions& options, bool blocking) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking ? 1 : 0;
  if (options.nccl_min_ctas > 0) {
    config.minCTAs = static_cast<int>(options.nccl_min_ctas);
    config.maxCTAs = std::max(config.minCTAs, kDefaultMaxCtas);  // NCCL requires both
  }
  if (options.nccl_max_ctas > 0) {
    config.maxCTAs = static_cast<int>(options.nccl_max_ctas);
  }
  return config;
}

void check_options(const CommunicatorOptions& options) {
  if (options.nccl_min_ctas < 0 || options.nccl_max_ctas < 0 ||
      (options.nccl_max_ctas > 0 && options.nccl_min_ctas > options.nccl_max_ctas)) {
    throw SettingsError(concat("context.communicator.nccl_min_ctas=", options.nccl_min_ctas,
                               " and nccl_max_ctas=", options.nccl_max_ctas,
                               ": allowed are 0 (NCCL's choice) or more, and a minimum up to the "
                               "maximum"));
  }
}

ncclUniqueId agree_on_id(ControlPlane& control_plane) {
  ncclUniqueId id{};
  if (control_plane.rank() == 0) {
    check_nccl(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId");
  }
  const auto bytes = control_plane.broadcast(std::string(id.internal, sizeof(id.internal)));
  DDP_CHECK(bytes.size() == sizeof(id.internal), "the NCCL id has ", bytes.size(), " bytes");
  std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
  return id;
}

// Runs `action` in its own thread. Returns false if it did not end within `bound`; the thread is
// then detached.
bool run_bounded(std::chrono::milliseconds bound, std::function<void()> action) {
  std::packaged_task<void()> task(std::move(action));
  auto done = task.get_future();
  std::thread thread(std::move(task));
  if (done.wait_for(bound) != std::future_status::ready) {
    thread.detach();
    return false;
  }
  thread.join();
  done.get();
  return true;
}

// Waits for a non-blocking call on `comm`, even if NCCL returned ncclInProgress.
void wait_until_ready(ncclComm_t comm, const char* operation, const StopWaiting& stop_waiting) {
  auto sleep = 20us;
  for (;;) {
    ncclResult_t state = ncclInProgress;
    check_nccl(ncclCommGetAsyncError(comm, &state), comm, "ncclCommGetAsyncError");
    if (state != ncclInProgress) {
      check_nccl(state, comm, operation);
      return;
    }
    stop_waiting();
    std::this_thread::sleep_for(sleep);
    sleep = std::min<std::chrono::microseconds>(sleep * 2, 2000us);
  }
}

}  // namespace

void check_nccl(ncclResult_t code, ncclComm_t comm, const char* operation) {
  if (code == ncclSuccess || code == ncclInProgress) [[likely]] {
    return;
  }
  const char* last = ncclGetLastError(comm);
  const auto message =
      concat(operation, " failed: ", ncclGetErrorString(code),
             last == nullptr || *last == '\0' ? "" : concat(" (", last, ")"), "; ", hint_of(code));
  if (code == ncclInvalidUsage || code == ncclInvalidArgument) {
    throw SettingsError(message);
  }
  throw PeerLostError(message);
}

void NcclAborter::operator()(ncclComm_t comm) const {
  if (!run_bounded(5s, [comm, device = device] {
        cudaSetDevice(device);
        ncclCommAbort(comm);
      })) {
    log_error("ncclCommAbort did not end within 5 s; its thread is left behind");
  }
}

NcclCommPtr connect_nccl(ControlPlane& control_plane, c10::DeviceIndex device,
                         const CommunicatorOptions& options) {
  check_options(options);
  // NCCL fails with ncclInvalidUsage on some ranks and hangs on others if versions differ.
  int version = 0;
  check_nccl(ncclGetVersion(&version), nullptr, "ncclGetVersion");
  control_plane.require_equal("the NCCL version (fix: use one LibTorch and NCCL on all nodes)",
                              std::to_string(version));
  const auto id = agree_on_id(control_plane);
  RunningLimit limit(options.timeout);
  const auto stop_waiting = [&] {
    if (control_plane.failed()) {
      throw PeerLostError("NCCL did not start: " + control_plane.failure().message);
    }
    if (limit.is_over()) {
      throw PeerLostError(concat("NCCL did not connect ", control_plane.world_size(),
                                 " ranks within ", options.timeout.count(),
                                 " ms: a peer is lost or stuck; NCCL_DEBUG=INFO logs more"));
    }
  };
  auto config = make_config(options, /*blocking=*/false);
  ncclComm_t made = nullptr;
  const auto code =
      ncclCommInitRankConfig(&made, control_plane.world_size(), id, control_plane.rank(), &config);
  NcclCommPtr meeting(made, {device});
  check_nccl(code, meeting.get(), "ncclCommInitRankConfig");
  wait_until_ready(meeting.get(), "ncclCommInitRankConfig", stop_waiting);

  auto child_config = make_config(options, /*blocking=*/true);
  ncclComm_t child = nullptr;
  check_nccl(ncclCommSplit(meeting.get(), 0, control_plane.rank(), &child, &child_config),
             meeting.get(), "ncclCommSplit");
  wait_until_ready(meeting.get(), "ncclCommSplit", stop_waiting);
  DDP_CHECK(child != nullptr, "ncclCommSplit ended without a communicator");
  NcclCommPtr comm(child, {device});

  // The meeting communicator is no longer needed. Its destruction is bounded: nothing depends on
  // it.
  if (!run_bounded(30s, [meeting = meeting.release(), device] {
        cudaSetDevice(device);
        ncclCommDestroy(meeting);
      })) {
    log_warning("ncclCommDestroy of the communicator used to connect did not end within 30 s");
  }
  return comm;
}

NcclCommPtr split_nccl(ncclComm_t parent, c10::DeviceIndex device, int color, int key,
                       const CommunicatorOptions& options, const StopWaiting& stop_waiting) {
  struct Result {
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    std::promise<ncclResult_t> code;
  };
  // Shared, because the thread is detached if the wait ends early.
  auto result = std::make_shared<Result>();
  result->config = make_config(options, /*blocking=*/true);
  auto code = result->code.get_future();
  std::thread([result, parent, device, color, key] {
    cudaSetDevice(device);
    result->code.set_value(ncclCommSplit(parent, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                                         &result->comm, &result->config));
  }).detach();
  while (code.wait_for(1ms) != std::future_status::ready) {
    stop_waiting();
  }
  check_nccl(code.get(), parent, "ncclCommSplit");
  return NcclCommPtr(result->comm, {device});
}

Membership membership_of(ncclComm_t comm, int64_t generation) {
  Membership membership{.generation = generation};
  check_nccl(ncclCommUserRank(comm, &membership.rank), comm, "ncclCommUserRank");
  check_nccl(ncclCommCount(comm, &membership.world_size), comm, "ncclCommCount");
  return membership;
}

NcclHandle::NcclHandle(NcclCommPtr comm)
    : device_(comm.get_deleter().device), comm_(std::move(comm)) {}

ncclComm_t NcclHandle::get(const char* operation) const {
  const std::lock_guard lock(mutex_);
  state_->check(operation);
  return comm_.get();
}

bool NcclHandle::poll_async_error() const {
  ncclResult_t code = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr || state_->aborted()) {
      return false;
    }
    if (ncclCommGetAsyncError(comm_.get(), &code) != ncclSuccess) {
      code = ncclInternalError;
    }
  }
  check_nccl(code, nullptr, "a collective of the nccl communicator");
  return true;
}

NcclCommPtr NcclHandle::take() {
  const std::lock_guard lock(mutex_);
  return std::move(comm_);
}

bool NcclHandle::destroy() {
  auto comm = take();
  if (comm == nullptr) {
    return true;
  }
  auto code = std::make_shared<std::atomic<ncclResult_t>>(ncclSuccess);
  if (!run_bounded(30s, [comm = comm.release(), code, device = device_] {
        cudaSetDevice(device);
        code->store(ncclCommDestroy(comm));
      })) {
    log_warning(
        "ncclCommDestroy did not end within 30 s; fix: destroy the CUDA graphs that captured "
        "collectives before their communicator");
    return false;
  }
  check_nccl(code->load(), nullptr, "ncclCommDestroy");
  return true;
}

void NcclHandle::abort(const std::function<void()>& abandon) {
  const auto comm = take();  // aborted when this function returns
  abandon();
}

}  // namespace ddp::detail
