// SPDX-License-Identifier: Apache-2.0
#include "comm/job/cuda_device.hpp"

#include <unistd.h>

#ifdef DDP_HAS_CUDA
#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <string_view>

#include "comm/cuda_check.hpp"
#include "core/control/wire/authentication.hpp"
#include "ops/gemm/cublaslt_gemm.hpp"
#endif

#include "core/control/wire/tcp_socket.hpp"
#include "ddp/core/error.hpp"
#include "ops/shared/private_stream.hpp"

namespace ddp::detail {
namespace {

// Empty if CUDA counted the GPUs. That there are none is no error.
std::string count_error() {
#ifdef DDP_HAS_CUDA
  int count = 0;
  const auto code = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());  // not an error of a later call
  return code == cudaSuccess || code == cudaErrorNoDevice ? "" : cudaGetErrorString(code);
#else
  return {};
#endif
}

}  // namespace

GpuProbe probe_gpus() {
  return {.built_with_cuda = built_with_cuda(),
          .num_visible = count_gpus(),
          .cuda_error = count_error(),
          .has_driver_file = access("/dev/nvidiactl", F_OK) == 0};
}

std::optional<LostGpus> find_lost_gpus() {
  return find_lost_gpus(probe_gpus(), process_environment(), host_name());
}

#ifdef DDP_HAS_CUDA

bool built_with_cuda() {
  return true;
}

int count_gpus() {
  return c10::cuda::device_count();
}

void identify_gpu(int index, DeviceReport& report) {
  cudaDeviceProp properties{};
  char address[32] = {};
  for (const auto code : {cudaGetDeviceProperties(&properties, index),
                          cudaDeviceGetPCIBusId(address, sizeof(address), index)}) {
    if (code != cudaSuccess) {
      throw SettingsError(concat("GPU ", index, " of ", report.host, " cannot be used: ",
                                 cudaGetErrorString(code), "; fix: see nvidia-smi"));
    }
  }
  // Parts of a partitioned GPU share its PCI address, but not its identity.
  report.gpu = to_hex(std::string_view(properties.uuid.bytes, sizeof(properties.uuid.bytes)));
  report.gpu_name = concat(properties.name, " ", address);
}

Plan::Identity kernels_identity(c10::Device device) {
  if (!device.is_cuda()) {
    return {{"gpu", "none"}};
  }
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device.index()), "cudaGetDeviceProperties");
  const auto& hooks = at::detail::getCUDAHooks();
  return {{"gpu", properties.name},
          {"cudnn", std::to_string(hooks.hasCuDNN() ? hooks.versionRuntimeCuDNN() : 0)},
          {"cublaslt", std::to_string(ops::detail::cublaslt_version())},
          {"proposals", "1"}};  // increment when the measured candidates or their order change
}

void use_gpu(c10::Device device) {
  c10::cuda::set_device(device.index());
  // This runs before any module is wrapped, because an AccumulateGrad made on the default stream
  // cannot be captured. The priority is above side streams and below reductions. So kernels that
  // the rest of the step waits for get multiprocessors first, also inside a CUDA graph.
  c10::cuda::setCurrentCUDAStream(c10::cuda::CUDAStream(
      ops::detail::make_private_stream(device, ops::detail::StreamPriority::Middle)));
}

#else

bool built_with_cuda() {
  return false;
}
int count_gpus() {
  return 0;
}
void identify_gpu(int, DeviceReport&) {
  throw InternalError("built without CUDA");
}
Plan::Identity kernels_identity(c10::Device) {
  return {{"gpu", "none"}};
}
void use_gpu(c10::Device) {
  throw InternalError("built without CUDA");
}

#endif

}  // namespace ddp::detail
