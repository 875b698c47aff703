// SPDX-License-Identifier: Apache-2.0
// Merges the traces of all ranks on one clock. Torch-free.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// This rank's clock minus rank 0's.
struct ClockOffset {
  int64_t offset_ns = 0;
  int64_t error_ns = 0;  ///< the true offset lies within offset ± error
  friend auto message_fields(ClockOffset& offset) {
    return std::tie(offset.offset_ns, offset.error_ns);
  }
};

/// One round of messages: rank 0 reads its clock (`sent`), this rank receives that time
/// (`received`) and answers (`answered`). Then rank 0 has all answers (`gathered`).
struct ClockRound {
  int64_t sent = 0;
  int64_t received = 0;
  int64_t answered = 0;
  int64_t gathered = 0;
};

/// A message is never received before it was sent, so received - sent >= offset and answered -
/// gathered <= offset. The tightest bounds of all rounds apply.
ClockOffset estimate_clock_offset(const std::vector<ClockRound>& rounds);

/// Measures over the control plane. Collective.
ClockOffset measure_clock_offset(ControlPlane& control_plane, int num_rounds = 16);

/// All ranks' events on rank 0, indexed by rank; empty elsewhere. Collective, in parts of 512 KiB.
std::vector<std::vector<TraceEvent>> gather_events(ControlPlane& control_plane,
                                                   const std::vector<TraceEvent>& events);

/// Chrome's trace format: one process per rank, one line per track. Spans of one track that overlap
/// without nesting get separate lines. Times are shifted so that the first span begins at 0.
std::string trace_to_json(const std::vector<std::vector<TraceEvent>>& events_by_rank,
                          const std::vector<ClockOffset>& offsets);

}  // namespace ddp::detail
