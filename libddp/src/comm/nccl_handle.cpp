// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_handle.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <utility>

#include "comm/nccl_connect.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

using namespace std::chrono_literals;

NcclHandle::NcclHandle(ncclComm_t comm, c10::DeviceIndex device) : device_(device), comm_(comm) {
  check_nccl(ncclCommUserRank(comm_, &rank_), comm_, "ncclCommUserRank");
  check_nccl(ncclCommCount(comm_, &world_size_), comm_, "ncclCommCount");
}

ncclComm_t NcclHandle::get(const char* operation) const {
  const std::lock_guard lock(mutex_);
  state_->check(operation);
  return comm_;
}

bool NcclHandle::poll_async_error() const {
  ncclResult_t code = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr || state_->aborted()) {
      return false;
    }
    if (ncclCommGetAsyncError(comm_, &code) != ncclSuccess) {
      code = ncclInternalError;
    }
  }
  check_nccl(code, nullptr, "a collective of the nccl communicator");
  return true;
}

ncclComm_t NcclHandle::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(comm_, nullptr);
}

bool NcclHandle::destroy(const std::function<void()>& close) {
  const auto comm = take();
  if (comm == nullptr) {
    return true;
  }
  close();
  auto code = std::make_shared<std::atomic<ncclResult_t>>(ncclSuccess);
  if (!run_bounded(30s, [comm, code, device = device_] {
        cudaSetDevice(device);
        code->store(ncclCommDestroy(comm));
      })) {
    log_warning(
        "ncclCommDestroy did not end within 30 s; destroy the CUDA graphs that captured "
        "collectives before their communicator");
    return false;
  }
  check_nccl(code->load(), nullptr, "ncclCommDestroy");
  return true;
}

void NcclHandle::abort(const std::function<void()>& abandon) {
  const auto comm = take();
  abandon();
  if (comm != nullptr && !run_bounded(5s, [comm, device = device_] {
        cudaSetDevice(device);
        ncclCommAbort(comm);
      })) {
    log_error("ncclCommAbort did not end within 5 s; its thread is left behind");
  }
}

}  // namespace ddp::detail
