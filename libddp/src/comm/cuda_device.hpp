// SPDX-License-Identifier: Apache-2.0
// The CUDA calls a Context needs; without CUDA there are no GPUs.
#pragma once

#include <c10/core/Device.h>

#include "comm/device_choice.hpp"
#include "ddp/core/plan.hpp"

namespace ddp::detail {

bool built_with_cuda();

/// GPUs visible to this process; makes no CUDA context.
int count_gpus();

/// Fills `gpu` and `gpu_name` of visible GPU `index`.
void identify_gpu(int index, DeviceReport& report);

/// What measured choices of algorithms on `device` depend on: the GPU's name, the versions of the
/// cuDNN and cuBLASLt that run, and what is asked of them. On a CPU, where none is measured, that
/// there is no GPU.
Plan::Identity kernels_identity(c10::Device device);

/// Makes `device` current and gives this thread a stream of the pool.
void use_gpu(c10::Device device);

}  // namespace ddp::detail
