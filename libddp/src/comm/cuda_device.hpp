// SPDX-License-Identifier: Apache-2.0
// The CUDA calls a Context needs; without CUDA there are no GPUs.
#pragma once

#include <c10/core/Device.h>

#include "comm/device_choice.hpp"

namespace ddp::detail {

bool built_with_cuda();

/// GPUs visible to this process; makes no CUDA context.
int count_gpus();

/// Fills `gpu` and `gpu_name` of visible GPU `index`.
void identify_gpu(int index, DeviceReport& report);

/// Makes `device` current and gives this thread a stream of the pool.
void use_gpu(c10::Device device);

}  // namespace ddp::detail
