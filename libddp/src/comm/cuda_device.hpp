// SPDX-License-Identifier: Apache-2.0
// CUDA calls of a Context; without CUDA there are no GPUs.
#pragma once

#include <c10/core/Device.h>

#include "comm/device_choice.hpp"
#include "core/plan.hpp"

namespace ddp::detail {

bool built_with_cuda();

/// Number of GPUs visible to this process; creates no CUDA context.
int count_gpus();

/// Fills `gpu` and `gpu_name` of visible GPU `index`.
void identify_gpu(int index, DeviceReport& report);

/// The GPU's name, the cuDNN and cuBLASLt versions and the set of measured candidates: measured
/// choices of algorithms on `device` depend on them. For a CPU, states that there is no GPU.
Plan::Identity kernels_identity(c10::Device device);

/// Makes `device` current and sets a pool stream as this thread's current stream.
void use_gpu(c10::Device device);

}  // namespace ddp::detail
