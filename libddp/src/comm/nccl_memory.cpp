// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_memory.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/copy_kernels.hpp"
#include "comm/cuda_check.hpp"
#include "comm/nccl_handle.hpp"
#include "core/tcp_socket.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9)
#define DDP_NCCL_HAS_WINDOWS 1
#endif

namespace ddp::detail {
namespace {

bool is_set_to(const char* variable, std::string_view value) {
  const char* text = std::getenv(variable);
  return text != nullptr && text == value;
}

// Windows are shared as virtual memory handles. ncclMemAlloc gives these only if the driver and
// NCCL_CUMEM_ENABLE allow it; otherwise it uses cudaMalloc.
bool gives_shareable_memory() {
  void* const retain = find_driver_function("cuMemRetainAllocationHandle");
  void* const release = find_driver_function("cuMemRelease");
  if (retain == nullptr || release == nullptr) {
    return false;
  }
  void* memory = nullptr;
  check_nccl(ncclMemAlloc(&memory, 4096), nullptr, "ncclMemAlloc");
  CUmemGenericAllocationHandle handle{};
  const auto code =
      reinterpret_cast<CUresult (*)(CUmemGenericAllocationHandle*, void*)>(retain)(&handle, memory);
  if (code == CUDA_SUCCESS) {
    reinterpret_cast<CUresult (*)(CUmemGenericAllocationHandle)>(release)(handle);
  }
  ncclMemFree(memory);
  return code == CUDA_SUCCESS;
}

std::string why_not_here() {
#ifndef DDP_NCCL_HAS_WINDOWS
  return "this build's NCCL is older than 2.28.9";
#else
  int version = 0;
  check_nccl(ncclGetVersion(&version), nullptr, "ncclGetVersion");
  if (version < NCCL_VERSION(2, 28, 9)) {
    return concat("NCCL ", version, " is older than 2.28.9");
  }
  for (const auto& [variable, value] : {std::pair{"NCCL_CUMEM_ENABLE", "0"},
                                        {"NCCL_WIN_ENABLE", "0"},
                                        {"NCCL_P2P_DISABLE", "1"},
                                        {"NCCL_P2P_LEVEL", "LOC"},
                                        {"NCCL_P2P_LEVEL", "0"}}) {
    if (is_set_to(variable, value)) {
      return concat(variable, "=", value, " is set");
    }
  }
  if (find_driver_function("cuStreamBatchMemOp") == nullptr) {
    return "the driver has no cuStreamBatchMemOp";
  }
  return gives_shareable_memory() ? "" : "NCCL does not allocate shareable memory here";
#endif
}

// Without peer access NCCL still registers a window. This cannot check GPUs that this process does
// not see (CUDA_VISIBLE_DEVICES).
std::string why_not_with(const std::vector<std::string>& addresses) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  for (const auto& address : addresses) {
    int peer = 0;
    if (cudaDeviceGetByPCIBusId(&peer, address.c_str()) != cudaSuccess) {
      cudaGetLastError();  // not the program's error
      continue;
    }
    int can_access = 1;
    if (peer != device) {
      check_cuda(cudaDeviceCanAccessPeer(&can_access, device, peer), "cudaDeviceCanAccessPeer");
    }
    if (can_access == 0) {
      return concat("its GPU has no peer access to the one at ", address);
    }
  }
  return {};
}

// The window's address on each rank. Empty if NCCL has not mapped it on all ranks: then it gives no
// window of the device.
PeerAddresses addresses_of(ncclWindow_t window, ncclComm_t comm, at::Device device) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, window) != cudaSuccess ||
      attributes.type != cudaMemoryTypeDevice) {
    cudaGetLastError();
    return {};
  }
  int world_size = 0;
  check_nccl(ncclCommCount(comm, &world_size), comm, "ncclCommCount");
  const auto on_device = at::empty({world_size}, at::device(device).dtype(at::kLong));
  check_cuda(
      launch_peer_addresses(window, world_size, static_cast<void**>(on_device.mutable_data_ptr()),
                            c10::cuda::getCurrentCUDAStream(device.index()).stream()),
      "the kernel of peer addresses");
  const auto on_host = on_device.cpu();
  PeerAddresses addresses;
  for (int rank = 0; rank < world_size; ++rank) {
    addresses.push_back(reinterpret_cast<char*>(on_host.const_data_ptr<int64_t>()[rank]));
  }
  return addresses;
}

std::string pci_address() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  char address[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(address, sizeof(address), device), "cudaDeviceGetPCIBusId");
  return address;
}

}  // namespace

std::string why_no_windows(ControlPlane& control_plane) {
  const auto hosts = control_plane.all_gather(host_name());
  for (const auto& host : hosts) {
    if (host != hosts[0]) {
      return concat("the ranks are on several nodes (", hosts[0], ", ", host, ")");
    }
  }
  const auto addresses = control_plane.all_gather(pci_address());
  auto reason = why_not_here();
  const auto reasons =
      control_plane.all_gather(reason.empty() ? why_not_with(addresses) : std::move(reason));
  for (size_t rank = 0; rank < reasons.size(); ++rank) {
    if (!reasons[rank].empty()) {
      return concat(reasons[rank], " (rank ", rank, ")");
    }
  }
  return {};
}

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
    // In a symmetric window NCCL would take symmetric kernels, which no abort ends.
    check_nccl(ncclCommWindowRegister(comm, memory, padded, &window, NCCL_WIN_DEFAULT), comm,
               "ncclCommWindowRegister");
  } catch (...) {
    ncclMemFree(memory);
    throw;
  }
  const at::Device device(at::kCUDA, device_);
  {
    const std::lock_guard lock(mutex_);
    windows_[static_cast<const char*>(memory)] = {window, padded, {}};
  }
  auto tensor = at::from_blob(
      memory, {num_bytes}, [self = shared_from_this()](void* p) { self->free(p); },
      at::device(device).dtype(at::kByte), device);
  auto addresses = addresses_of(window, comm, device);
  if (!addresses.empty()) {
    int rank = 0;
    check_nccl(ncclCommUserRank(comm, &rank), comm, "ncclCommUserRank");
    addresses[static_cast<size_t>(rank)] = static_cast<char*>(memory);  // outlives the window
  }
  const std::lock_guard lock(mutex_);
  windows_.at(static_cast<const char*>(memory)).addresses = std::move(addresses);
  return tensor;
#else
  throw InternalError(concat("a window of ", num_bytes, " bytes without NCCL 2.28.9"));
#endif
}

PeerAddresses NcclMemory::find(const void* data, size_t num_bytes) {
  const auto* begin = static_cast<const char*>(data);
  const std::lock_guard lock(mutex_);
  auto after = windows_.upper_bound(begin);
  if (after == windows_.begin()) {
    return {};
  }
  --after;
  const auto& [start, window] = *after;
  if (begin + num_bytes > start + window.num_bytes) {
    return {};
  }
  auto addresses = window.addresses;
  for (auto& address : addresses) {
    address += begin - start;
  }
  return addresses;
}

void NcclMemory::close() {
  // Unmapping does not wait for copies.
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize before the windows end");
  const std::lock_guard lock(mutex_);
#ifdef DDP_NCCL_HAS_WINDOWS
  for (const auto& [memory, window] : windows_) {
    check_nccl(ncclCommWindowDeregister(comm_, window.handle), comm_, "ncclCommWindowDeregister");
  }
#endif
  windows_.clear();
  comm_ = nullptr;
}

void NcclMemory::abandon() {
  abandoned_ = true;
}

// Never throws, because a tensor's destructor calls it.
void NcclMemory::free(void* memory) {
  try {
    const c10::cuda::CUDAGuard guard(device_);
    if (!abandoned_) {
      // Unlike cudaFree, unmapping does not wait for kernels.
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize before ncclMemFree");
    }
    const std::lock_guard lock(mutex_);
    if (abandoned_) {
      return;  // a hung kernel may still use the memory, and the process will exit
    }
#ifdef DDP_NCCL_HAS_WINDOWS
    if (const auto found = windows_.find(static_cast<const char*>(memory));
        found != windows_.end()) {
      check_nccl(ncclCommWindowDeregister(comm_, found->second.handle), comm_,
                 "ncclCommWindowDeregister");
      windows_.erase(found);
    }
#endif
    check_nccl(ncclMemFree(memory), nullptr, "ncclMemFree");
  } catch (const std::exception& error) {
    log_error(error.what());
  }
}

}  // namespace ddp::detail
