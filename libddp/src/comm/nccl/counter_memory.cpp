// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/counter_memory.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>

#include <algorithm>

#include "comm/cuda_check.hpp"
#include "comm/nccl/nccl_kernels.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

CounterMemory::CounterMemory(size_t num_counters, cudaStream_t stream)
    : write_value_(find_driver_function("cuStreamWriteValue32")) {
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
  const size_t num_bytes = num_counters * sizeof(uint32_t);
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&totals_), num_bytes),
             "cudaMalloc of the counters");
  check_cuda(cudaMemsetAsync(totals_, 0, num_bytes, stream), "cudaMemsetAsync of the counters");
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&shown_), num_bytes,
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc of the counters");
  std::fill_n(shown_, num_counters, 0U);
  // Kernels are loaded at their first launch, which a capture may not allow.
  check_cuda(launch_counter_add(totals_, shown_, 0, stream), "the counter kernel");
  check_cuda(launch_counter_set(shown_, 0, stream), "the counter kernel");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

CounterMemory::~CounterMemory() {
  if (abandoned_) {
    return;
  }
  // A failure here means that the device is already lost; it cannot be reported.
  cudaFree(totals_);
  cudaFreeHost(shown_);
}

void CounterMemory::add(size_t index, uint32_t by, cudaStream_t stream) {
  check_cuda(launch_counter_add(totals_ + index, shown_ + index, by, stream), "the counter kernel");
}

void CounterMemory::set_first(uint32_t value, cudaStream_t stream) {
  // The kernel needs the device to be current. The driver's call needs a context in this thread,
  // which only a runtime call creates.
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  if (write_value_ == nullptr) {
    check_cuda(launch_counter_set(shown_, value, stream), "the counter kernel");
    return;
  }
  const auto write =
      reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>(write_value_);
  // Mapped memory has one address on host and device (unified addressing, all 64-bit systems).
  const auto code =
      write(stream, reinterpret_cast<CUdeviceptr>(shown_), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (code != CUDA_SUCCESS) [[unlikely]] {
    throw Error(
        ExitCode::UserException,
        concat("cuStreamWriteValue32 failed with CUDA driver error ", static_cast<int>(code)));
  }
}

}  // namespace ddp::detail
