// SPDX-License-Identifier: Apache-2.0
// A Chrome/Perfetto trace of a range of steps: forward, backward, each bucket's reduction,
// optimizer and loader of all ranks on one clock. Open the file in https://ui.perfetto.dev or
// chrome://tracing.
//
// Spans come from ddp::TraceScope and TraceRecorder (core/log/trace_recorder.hpp), also for a
// program's own spans. Metrics drives a Tracer if metrics.trace_steps is set; a Tracer also works
// alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp {

class Tracer {
 public:
  /// Traces the steps first_step .. first_step + num_steps - 1 into `path` (used only on rank 0).
  /// Collective if first_step is the next step to run (`next_step`), because recording starts. If
  /// first_step is past, as in a resumed run, logs a warning and traces nothing.
  Tracer(ControlPlane& control_plane, at::Device device, std::string path, int64_t first_step,
         int64_t num_steps, int64_t next_step = 0);
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  /// Call after each step. Collective when recording starts or ends: measures the clocks, gathers
  /// all ranks' spans, and rank 0 writes the file. If the file cannot be written, logs a warning.
  void end_step(int64_t step);

  bool done() const { return done_; }

 private:
  void begin();
  void finish();
  void give_up(int64_t next_step);

  ControlPlane& control_plane_;
  at::Device device_;
  std::string path_;
  int64_t first_step_;
  int64_t num_steps_;
  bool recording_ = false;
  bool seen_step_ = false;
  bool done_ = false;
  TraceRecorder recorder_;
};

/// Sends ranges of TraceScope to NVTX too, for Nsight. Does nothing without CUDA.
void enable_nvtx();

namespace detail {

/// The PCI bus id of a CUDA device ("0000:65:00.0"); empty for the CPU.
std::string pci_bus_id(at::Device device);

/// Memory in use on the whole device; on the CPU the peak memory of this process. GiB.
double used_memory_gib(at::Device device);

}  // namespace detail

}  // namespace ddp
