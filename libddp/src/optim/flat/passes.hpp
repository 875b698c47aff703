// SPDX-License-Identifier: Apache-2.0
// Passes over a flat optimizer's segments: host loops on the CPU, kernels on the current stream on
// CUDA.
//
// math.hpp defines an element's operations and their order. The order of sums depends only on the
// sizes, without atomics, so every run gives the same bits.
#pragma once

#include <c10/core/Device.h>

#include "optim/flat/math.hpp"

namespace ddp::detail {

/// Updates the segments of `gradients`. First counts their updates and computes their trust ratios,
/// if the rule has them.
void flat_update(const FlatStep& step, const FlatGradients& gradients, c10::Device device);

/// Fills `scan.sums` for the chunks of `gradients`.
void flat_scan(const FlatScan& scan, const FlatGradients& gradients, c10::Device device);
/// Call after all chunks: fills `scan.found` and `scan.report`.
void flat_scan_end(const FlatScan& scan, c10::Device device);

/// average += share * (weight - average), with at::lerp's formula. CUDA only.
void flat_average(const FlatAverage* averages, const FlatChunk* chunks, int num_chunks, float share,
                  c10::Device device);

}  // namespace ddp::detail
