// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_capture.hpp"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/nccl/collective_progress.hpp"
#include "reduce/model/model_parts.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/capture_failure.hpp"
#include "train/graph/captured_step.hpp"

namespace ddp::detail {
namespace {

/// While it lives, collectives wait for no counts: the optimizer need not wait for them.
class HeldCounts {
 public:
  explicit HeldCounts(const std::vector<Communicator*>& communicators) {
    for (auto* communicator : communicators) {
      if (auto* counts = communicator->capturable()) {
        counts->hold_counts();
        all_.push_back(counts);
      }
    }
  }
  void join() const {
    for (auto* counts : all_) {
      counts->join_counts();
    }
  }

 private:
  std::vector<CapturableCommunicator*> all_;
};

using ReducerStates = std::vector<Reducer::State>;  // one per model

ReducerStates reducer_states(const GraphedParts& parts) {
  ReducerStates states;
  for (auto* model : parts.models) {
    states.push_back(model->reducer().state());
  }
  return states;
}

std::vector<Communicator*> communicators(const CaptureParts& use) {
  std::vector<Communicator*> all{use.context.communicator().get()};
  for (const auto* model : use.parts.models) {
    auto* communicator = model->communicator().get();
    if (std::find(all.begin(), all.end(), communicator) == all.end()) {
      all.push_back(communicator);
    }
  }
  return all;
}

/// Removes the host state of a capture whose graph will never run.
void undo(const GraphedParts& parts, const ReducerStates& before) {
  for (size_t i = 0; i < before.size(); ++i) {
    parts.models[i]->reducer().restore(before[i]);
  }
  if (parts.scaler != nullptr) {
    parts.scaler->reset_step();
  }
}

/// Returns the reason of a failure; empty: success.
std::string record(const CaptureParts& use, StepCall& call, uint64_t sequence, int64_t step_bytes,
                   std::unique_ptr<CapturedStep>& step) {
  std::vector<at::Tensor> inputs_before;
  for (const at::Tensor* input : call.inputs) {
    inputs_before.push_back(*input);
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
  const HeldCounts counts(communicators(use));
  const std::function<void()> join_counts = [&counts] { counts.join(); };
  std::string failing;
  std::string reason;
  try {
    step = CapturedStep::capture({.feed = use.feed,
                                  .ring = use.ring,
                                  .parts = use.parts,
                                  .pool = *use.pool,
                                  .call = call,
                                  .sequence = sequence,
                                  .at_end = join_counts,
                                  .step_bytes = step_bytes},
                                 &failing);
  } catch (const PeerLostError&) {
    throw;
  } catch (const std::exception&) {
    reason = capture_failure(std::current_exception(), failing);
    join_counts();
  }
  // The replay or the eager step reads the batch itself.
  for (size_t i = 0; i < inputs_before.size(); ++i) {
    *call.inputs[i] = inputs_before[i];
  }
  return reason;
}

std::string capture(const CaptureParts& use, StepCall& call, uint64_t sequence, int64_t step_bytes,
                    const ReducerStates& before, std::unique_ptr<CapturedStep>& step) {
  auto reason = record(use, call, sequence, step_bytes, step);
  const bool is_rehearsal = step != nullptr && step->is_rehearsal();
  for (size_t i = 0; i < before.size() && reason.empty() && !is_rehearsal; ++i) {
    reason = why_not_replayed(use.parts.models[i]->reducer(), before[i]);
  }
  if (reason.empty()) {
    try {
      step->instantiate();
    } catch (const std::exception&) {
      reason = capture_failure(std::current_exception(), "cudaGraphInstantiate");
    }
  }
  return reason;
}

}  // namespace

std::unique_ptr<StepGraph> capture_step(const CaptureParts& use, StepCall& call, uint64_t sequence,
                                        int64_t step_bytes, std::string* reason) {
  const auto before = reducer_states(use.parts);
  const auto gradients_before = hash_gradients(use.parts);
  std::unique_ptr<CapturedStep> step;
  try {
    *reason = capture(use, call, sequence, step_bytes, before, step);
  } catch (...) {  // a rank is lost
    undo(use.parts, before);
    throw;
  }
  if (!reason->empty()) {
    undo(use.parts, before);
    return nullptr;
  }
  if (step->is_rehearsal()) {
    undo(use.parts, before);
    step->set_backward(gradients_before, {});
    return step;
  }
  auto after = reducer_states(use.parts);
  bool has_backward = false;
  std::vector<Reducer::Local> left;
  CapturedStep::BufferStates buffers;
  for (size_t i = 0; i < before.size(); ++i) {
    has_backward = has_backward || before[i].history != after[i].history;
    buffers.push_back(deciding_buffer_state(*use.parts.models[i]));
    left.push_back(std::move(after[i].local));
  }
  step->set_buffers(std::move(buffers));
  if (has_backward) {
    const bool changes = gradients_before != hash_gradients(use.parts);
    step->set_backward(gradients_before, changes ? std::move(left) : std::vector<Reducer::Local>());
  }
  return step;
}

}  // namespace ddp::detail
