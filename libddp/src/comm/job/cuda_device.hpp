// SPDX-License-Identifier: Apache-2.0
// CUDA calls of a Context. A build without CUDA sees no GPUs.
#pragma once

#include <c10/core/Device.h>

#include "comm/job/device_choice.hpp"
#include "core/files/plan.hpp"

namespace ddp::detail {

bool built_with_cuda();

/// Counts the GPUs that this process sees. Creates no CUDA context.
int count_gpus();

/// The same with what explains a count of 0.
GpuProbe probe_gpus();

/// find_lost_gpus() of this process. For device=auto: other choices state what they want.
std::optional<LostGpus> find_lost_gpus();

/// Fills `gpu` and `gpu_name` of visible GPU `index`.
void identify_gpu(int index, DeviceReport& report);

/// Returns what measured choices of algorithms on `device` depend on: the GPU's name, the cuDNN and
/// cuBLASLt versions and the set of measured candidates. For a CPU the GPU is "none".
Plan::Identity kernels_identity(c10::Device device);

/// Makes `device` current and sets a pool stream as this thread's current stream.
void use_gpu(c10::Device device);

}  // namespace ddp::detail
