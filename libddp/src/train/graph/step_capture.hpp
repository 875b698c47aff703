// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/train/graphed_step.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/capture_agreement.hpp"
#include "train/graph/captured_step.hpp"
#include "train/graph/step_cache.hpp"

namespace ddp::detail {

/// Captures calls of one GraphedStep on all ranks together. Capturing executes nothing on the
/// device. The host's side of a failed capture is undone.
class StepCapture {
 public:
  /// All arguments outlive this object. `pool` may be null if nothing is captured.
  StepCapture(Context& context, const GraphedParts& parts, const StepFeed& feed,
              const StepRing& ring, GraphPool* pool, CaptureAgreement& agreement);

  /// Returns null with the first rank's `reason` if any rank's capture failed. `step_bytes` is the
  /// peak memory of an eager step; 0: not known. Throws if the ranks were not in the same call, or
  /// a rank is lost.
  std::unique_ptr<StepGraph> capture(StepCall& call, uint64_t sequence, int64_t step_bytes,
                                     std::string* reason);

 private:
  using ReducerStates = std::vector<Reducer::State>;  // one per model

  ReducerStates reducer_states() const;
  std::string capture_on_all_ranks(StepCall& call, uint64_t sequence, int64_t step_bytes,
                                   const ReducerStates& before,
                                   std::unique_ptr<CapturedStep>& step);
  std::string capture_here(StepCall& call, uint64_t sequence, int64_t step_bytes,
                           std::unique_ptr<CapturedStep>& step,
                           std::vector<std::string>& operations);
  void undo(const ReducerStates& before);
  std::vector<Communicator*> communicators() const;

  Context& context_;
  const GraphedParts& parts_;
  const StepFeed& feed_;
  const StepRing& ring_;
  GraphPool* const pool_;
  CaptureAgreement& agreement_;
};

}  // namespace ddp::detail
