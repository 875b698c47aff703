// SPDX-License-Identifier: Apache-2.0
// The passes of flat_kernels.hpp on a device: host functions on the CPU, kernels on the current
// stream on CUDA.
#pragma once

#include <c10/core/Device.h>

#include "optim/flat_kernels.hpp"

namespace ddp::detail {

void flat_update(const FlatStep& step, const FlatGradients& gradients, c10::Device device);
void flat_scan(const FlatScan& scan, const FlatGradients& gradients, c10::Device device);
void flat_scan_end(const FlatScan& scan, c10::Device device);
/// CUDA only.
void flat_average(const FlatAverage* averages, const FlatChunk* chunks, int num_chunks, float share,
                  c10::Device device);

}  // namespace ddp::detail
