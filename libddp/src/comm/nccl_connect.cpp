// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_connect.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <thread>

#include "comm/cuda_check.hpp"
#include "core/failure_cause.hpp"
#include "core/running_clock.hpp"
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
      return "a CUDA call inside NCCL failed: often an earlier kernel's error, or no memory left "
             "on "
             "the device";
    case ncclSystemError:
      return "a system call failed: look at NCCL_SOCKET_IFNAME, the size of /dev/shm and ulimit "
             "-l; "
             "NCCL_DEBUG=INFO tells more";
    case ncclRemoteError:
      return "a peer left or its network broke";
    case ncclInvalidUsage:
      return "often two ranks on one GPU, or ranks that run different NCCL versions";
    case ncclInvalidArgument:
      return "libddp checks arguments before NCCL does: please report this";
    default:
      return "NCCL_DEBUG=INFO tells more";
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
                               ": allowed are 0 (NCCL's choice) or more, the minimum not above the "
                               "maximum"));
  }
  if (options.nccl_algorithm != "auto" && options.nccl_algorithm != "ring" &&
      options.nccl_algorithm != "symmetric") {
    throw SettingsError(concat("context.communicator.nccl_algorithm=", options.nccl_algorithm,
                               " is unknown: use auto, ring or symmetric"));
  }
}

// Otherwise NCCL fails with ncclInvalidUsage on some ranks and hangs on others.
void compare_ranks(ControlPlane& control_plane, int device_index) {
  int version = 0;
  check_nccl(ncclGetVersion(&version), nullptr, "ncclGetVersion");
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device_index), "cudaGetDeviceProperties");
  const auto versions = control_plane.all_gather(std::to_string(version));
  const auto uuids =
      control_plane.all_gather(std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes)));
  for (size_t rank = 0; rank < versions.size(); ++rank) {
    if (versions[rank] != versions[0]) {
      throw MismatchError(concat("rank 0 runs NCCL ", versions[0], ", but rank ", rank,
                                 " runs NCCL ", versions[rank],
                                 "; use one LibTorch and NCCL on all nodes"));
    }
    for (size_t other = 0; other < rank; ++other) {
      if (uuids[rank] == uuids[other]) {
        throw SettingsError(
            concat("rank ", other, " and rank ", rank,
                   " were given the same GPU, and NCCL needs one for each rank: start "
                   "at most as many ranks on a node as it has GPUs "
                   "(--ntasks-per-node, --nproc-per-node)"));
      }
    }
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

// Aborts the communicator unless released, so an exception leaves no NCCL thread behind.
class AbortOnError {
 public:
  explicit AbortOnError(ncclComm_t comm) : comm_(comm) {}
  AbortOnError(const AbortOnError&) = delete;
  AbortOnError& operator=(const AbortOnError&) = delete;
  ~AbortOnError() {
    if (comm_ != nullptr && !run_bounded(10s, [comm = comm_] { ncclCommAbort(comm); })) {
      log_error("ncclCommAbort did not end within 10 s; its thread is left behind");
    }
  }
  void release() { comm_ = nullptr; }

 private:
  ncclComm_t comm_;
};

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

ncclComm_t connect_nccl(ControlPlane& control_plane, int device_index,
                        const CommunicatorOptions& options) {
  check_options(options);
  compare_ranks(control_plane, device_index);
  const auto id = agree_on_id(control_plane);
  RunningLimit limit(options.timeout);
  const auto stop_waiting = [&] {
    if (control_plane.failed()) {
      throw PeerLostError("NCCL's start was given up: " + control_plane.failure().message);
    }
    if (limit.is_over()) {
      throw PeerLostError(concat("NCCL did not connect ", control_plane.world_size(),
                                 " ranks within ", options.timeout.count(),
                                 " ms: a peer is lost or stuck; NCCL_DEBUG=INFO tells more"));
    }
  };
  auto config = make_config(options, /*blocking=*/false);
  ncclComm_t meeting = nullptr;
  check_nccl(ncclCommInitRankConfig(&meeting, control_plane.world_size(), id, control_plane.rank(),
                                    &config),
             meeting, "ncclCommInitRankConfig");
  AbortOnError guard(meeting);
  wait_until_ready(meeting, "ncclCommInitRankConfig", stop_waiting);

  auto child_config = make_config(options, /*blocking=*/true);
  ncclComm_t comm = nullptr;
  check_nccl(ncclCommSplit(meeting, 0, control_plane.rank(), &comm, &child_config), meeting,
             "ncclCommSplit");
  wait_until_ready(meeting, "ncclCommSplit", stop_waiting);
  DDP_CHECK(comm != nullptr, "ncclCommSplit ended without a communicator");

  // The meeting communicator is no longer needed. Its destruction is bounded: nothing depends on
  // it.
  guard.release();
  if (!run_bounded(30s, [meeting, device_index] {
        cudaSetDevice(device_index);
        ncclCommDestroy(meeting);
      })) {
    log_warning("ncclCommDestroy of the communicator used to connect did not end within 30 s");
  }
  return comm;
}

ncclComm_t split_nccl(ncclComm_t parent, int device_index, int color, int key,
                      const CommunicatorOptions& options, const StopWaiting& stop_waiting) {
  struct Result {
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    std::promise<ncclResult_t> code;
  };
  // Shared, because the thread is detached if the wait is given up.
  auto result = std::make_shared<Result>();
  result->config = make_config(options, /*blocking=*/true);
  auto code = result->code.get_future();
  std::thread([result, parent, device_index, color, key] {
    cudaSetDevice(device_index);
    result->code.set_value(ncclCommSplit(parent, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                                         &result->comm, &result->config));
  }).detach();
  while (code.wait_for(1ms) != std::future_status::ready) {
    stop_waiting();
  }
  check_nccl(code.get(), parent, "ncclCommSplit");
  return result->comm;
}

}  // namespace ddp::detail
