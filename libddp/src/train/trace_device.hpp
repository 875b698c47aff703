// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "core/trace_recorder.hpp"

namespace ddp::detail {

/// Marks as CUDA events, synchronized once with the steady clock here; nullptr for the CPU.
std::shared_ptr<TraceDevice> make_trace_device(at::Device device);

/// Starts recording in Nsight with --capture-range=cudaProfilerApi (ncu: --profile-from-start off).
/// Does nothing on the CPU and without a profiler.
void start_profiler(at::Device device);
void stop_profiler(at::Device device);

/// The PCI bus id of a CUDA device ("0000:65:00.0"); empty for the CPU.
std::string pci_bus_id(at::Device device);

/// Memory in use on the whole device; on the CPU the peak memory of this process. GiB.
double used_memory_gib(at::Device device);

}  // namespace ddp::detail
