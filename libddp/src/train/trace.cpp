// SPDX-License-Identifier: Apache-2.0
#include "train/trace.hpp"

#include <fstream>
#include <utility>

#include "core/message_codec.hpp"
#include "core/rank_position.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "train/trace_device.hpp"
#include "train/trace_merge.hpp"

namespace ddp {

Tracer::Tracer(ControlPlane& control_plane, at::Device device, std::string path, int64_t first_step,
               int64_t num_steps, int64_t next_step)
    : control_plane_(control_plane),
      device_(device),
      path_(std::move(path)),
      first_step_(first_step),
      num_steps_(num_steps) {
  if (first_step_ == next_step) {
    begin();
  } else if (first_step_ < next_step) {
    give_up(next_step);
  }
}

Tracer::~Tracer() {
  recorder_.stop();
}

void Tracer::begin() {
  const detail::ActivityScope activity(control_plane_, "trace");
  control_plane_.barrier();
  recorder_.set_device(detail::make_trace_device(device_));
  recorder_.set_step(first_step_);
  recording_ = true;
  detail::start_profiler(device_);
  recorder_.start();
}

void Tracer::give_up(int64_t next_step) {
  recorder_.stop();
  recording_ = false;
  done_ = true;
  if (control_plane_.rank() == 0) {
    log_warning(concat("nothing is traced: metrics.trace_first_step=", first_step_,
                       " is past, this run goes on with step ", next_step));
  }
}

void Tracer::end_step(int64_t step) {
  if (done_) {
    return;
  }
  const bool begun = recording_ ? step > first_step_ : step >= first_step_;
  if (!std::exchange(seen_step_, true) && begun) {
    give_up(step);  // the constructor was not given the resumed step
    return;
  }
  if (recording_) {
    recorder_.set_step(step + 1);
    if (step + 1 >= first_step_ + num_steps_) {
      finish();
    }
  } else if (step + 1 == first_step_) {
    begin();
  }
}

void Tracer::finish() {
  recorder_.stop();
  recording_ = false;
  done_ = true;
  const auto events = recorder_.take();  // waits for the steps' kernels
  detail::stop_profiler(device_);
  const detail::ActivityScope activity(control_plane_, "trace");
  const auto offset = detail::measure_clock_offset(control_plane_);
  const auto by_rank = detail::gather_events(control_plane_, events);
  const auto offsets = detail::gather_messages(control_plane_, offset);
  if (recorder_.num_dropped() > 0) {
    log_warning(std::to_string(recorder_.num_dropped()) + " spans did not fit into the trace");
  }
  if (control_plane_.rank() != 0) {
    return;
  }
  std::ofstream out(path_, std::ios::binary | std::ios::trunc);
  out << detail::trace_to_json(by_rank, offsets) << std::flush;
  if (out) {
    log_info("trace of " + std::to_string(num_steps_) + " steps in " + path_ +
             " (open in https://ui.perfetto.dev)");
  } else {
    log_warning("cannot write the trace " + path_);
  }
}

}  // namespace ddp
