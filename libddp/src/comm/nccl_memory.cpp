// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_memory.hpp"

#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>

#include "comm/cuda_check.hpp"
#include "comm/nccl_connect.hpp"
#include "ddp/core/logging.hpp"

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
#define DDP_NCCL_HAS_WINDOWS 1
#endif

namespace ddp::detail {

at::Tensor NcclMemory::allocate(int64_t num_bytes) {
#ifdef DDP_NCCL_HAS_WINDOWS
  constexpr size_t kPage = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT
  const auto padded = (static_cast<size_t>(num_bytes) + kPage - 1) / kPage * kPage;
  const auto comm = [this] {
    const std::lock_guard lock(mutex_);
    return comm_;
  }();
  void* memory = nullptr;
  check_nccl(ncclMemAlloc(&memory, padded), comm, "ncclMemAlloc");
  ncclWindow_t window{};
  try {
    check_nccl(ncclCommWindowRegister(comm, memory, padded, &window, NCCL_WIN_COLL_SYMMETRIC), comm,
               "ncclCommWindowRegister");
  } catch (...) {
    ncclMemFree(memory);
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    windows_[memory] = window;
  }
  const at::Device device(at::kCUDA, device_);
  return at::from_blob(
      memory, {num_bytes}, [self = shared_from_this()](void* p) { self->free(p); },
      at::device(device).dtype(at::kByte), device);
#else
  throw SettingsError(concat(
      "context.communicator.nccl_symmetric_memory=true needs NCCL 2.27 or newer to allocate ",
      num_bytes, " bytes; set it to false"));
#endif
}

void NcclMemory::close() {
  const std::lock_guard lock(mutex_);
#ifdef DDP_NCCL_HAS_WINDOWS
  for (const auto& [memory, window] : windows_) {
    check_nccl(ncclCommWindowDeregister(comm_, window), comm_, "ncclCommWindowDeregister");
  }
#endif
  windows_.clear();
  comm_ = nullptr;
}

void NcclMemory::abandon() {
  abandoned_ = true;
}

// Runs in a tensor's end: nothing is thrown.
void NcclMemory::free(void* memory) {
  try {
    const c10::cuda::CUDAGuard guard(device_);
    if (!abandoned_) {
      // Unmapping does not wait for kernels as cudaFree does.
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize before ncclMemFree");
    }
    const std::lock_guard lock(mutex_);
    if (abandoned_) {
      return;  // a kernel that never ends may still hold it; the process is about to leave
    }
#ifdef DDP_NCCL_HAS_WINDOWS
    if (const auto found = windows_.find(memory); found != windows_.end()) {
      check_nccl(ncclCommWindowDeregister(comm_, found->second), comm_, "ncclCommWindowDeregister");
      windows_.erase(found);
    }
#endif
    check_nccl(ncclMemFree(memory), nullptr, "ncclMemFree");
  } catch (const std::exception& error) {
    log_error(error.what());
  }
}

}  // namespace ddp::detail
