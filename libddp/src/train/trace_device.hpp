// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "ddp/core/trace_recorder.hpp"

namespace ddp::detail {

/// Marks by CUDA events, tied to the steady clock by one wait now; nullptr for the CPU.
std::shared_ptr<TraceDevice> make_trace_device(at::Device device);

/// What Nsight records with --capture-range=cudaProfilerApi (ncu: --profile-from-start off);
/// nothing on the CPU, and nothing where no profiler listens.
void start_profiler(at::Device device);
void stop_profiler(at::Device device);

/// The PCI bus id of a CUDA device ("0000:65:00.0"); empty for the CPU.
std::string pci_bus_id(at::Device device);

/// Memory in use on the whole device, or of this process at its peak where `device` is the CPU.
/// GiB.
double used_memory_gib(at::Device device);

}  // namespace ddp::detail
