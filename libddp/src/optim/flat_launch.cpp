// SPDX-License-Identifier: Apache-2.0
#include "optim/flat_launch.hpp"

#include "ddp/core/error.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ddp::detail {
namespace {

// Runs `host`, or `launch(stream)` on the device's current stream.
template <typename Host, typename Launch>
void run_on(c10::Device device, Host host, [[maybe_unused]] Launch launch) {
  if (device.is_cpu()) {
    host();
    return;
  }
#ifdef DDP_HAS_CUDA
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(launch(c10::cuda::getCurrentCUDAStream(device.index()).stream()));
#else
  DDP_CHECK(false, "this build has no CUDA parts");
#endif
}

}  // namespace

void flat_update(const FlatStep& step, const FlatGradients& gradients, c10::Device device) {
  if (gradients.num_chunks == 0) {
    return;
  }
  run_on(
      device, [&] { host_flat_update(step, gradients); },
      [&](auto stream) { return launch_flat_update(step, gradients, stream); });
}

void flat_scan(const FlatScan& scan, const FlatGradients& gradients, c10::Device device) {
  if (gradients.num_chunks == 0) {
    return;
  }
  run_on(
      device, [&] { host_flat_scan(scan, gradients); },
      [&](auto stream) { return launch_flat_scan(scan, gradients, stream); });
}

void flat_scan_end(const FlatScan& scan, c10::Device device) {
  run_on(
      device, [&] { host_flat_scan_end(scan); },
      [&](auto stream) { return launch_flat_scan_end(scan, stream); });
}

void flat_average(const FlatAverage* averages, const FlatChunk* chunks, int num_chunks, float share,
                  c10::Device device) {
  run_on(
      device, [] { DDP_CHECK(false, "averages on the CPU are ATen's"); },
      [&](auto stream) {
        return launch_flat_average(averages, chunks, num_chunks, share, stream);
      });
}

}  // namespace ddp::detail
