// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_capture.hpp"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/collective_progress.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/capture_failure.hpp"
#include "train/graph/captured_step.hpp"

namespace ddp::detail {
namespace {

/// Observes the collectives that a capture calls.
class CollectivesInCapture {
 public:
  explicit CollectivesInCapture(const std::vector<Communicator*>& communicators) {
    for (auto* communicator : communicators) {
      logs_.push_back(dynamic_cast<OperationLog*>(communicator));
      before_.push_back(logs_.back() == nullptr ? 0 : logs_.back()->num_operations());
      if (logs_.back() != nullptr) {
        logs_.back()->hold_counts();  // the optimizer need not wait for the counts
      }
    }
  }
  void join_counts() const {
    for (auto* log : logs_) {
      if (log != nullptr) {
        log->join_counts();
      }
    }
  }
  std::vector<std::string> operations() const {
    std::vector<std::string> all;
    for (size_t i = 0; i < logs_.size(); ++i) {
      if (const auto* log = logs_[i]) {
        const auto captured = log->captured_operations(before_[i]);
        all.insert(all.end(), captured.begin(), captured.end());
      }
    }
    return all;
  }

 private:
  std::vector<int64_t> before_;
  std::vector<OperationLog*> logs_;  // null: the communicator has none
};

using ReducerStates = std::vector<Reducer::State>;  // one per model

ReducerStates reducer_states(const GraphedParts& parts) {
  ReducerStates states;
  for (auto* model : parts.models) {
    states.push_back(model->reducer().state());
  }
  return states;
}

// In the same order on all ranks.
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

/// Returns the reason of a failure on this rank; empty: success.
std::string capture_here(const CaptureParts& use, StepCall& call, uint64_t sequence,
                         int64_t step_bytes, std::unique_ptr<CapturedStep>& step,
                         std::vector<std::string>& operations) {
  std::vector<at::Tensor> inputs_before;
  for (const at::Tensor* input : call.inputs) {
    inputs_before.push_back(*input);
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
  const CollectivesInCapture collectives(communicators(use));
  const std::function<void()> join_counts = [&collectives] { collectives.join_counts(); };
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
  operations = collectives.operations();
  // The replay or the eager step reads the batch itself.
  for (size_t i = 0; i < inputs_before.size(); ++i) {
    *call.inputs[i] = inputs_before[i];
  }
  return reason;
}

/// Returns the first rank's reason why no rank replays; empty: all replay.
std::string capture_on_all_ranks(const CaptureParts& use, StepCall& call, uint64_t sequence,
                                 int64_t step_bytes, const ReducerStates& before,
                                 std::unique_ptr<CapturedStep>& step) {
  auto report = use.agreement.begin_capture(sequence, call.numbers.variant, shapes_of(call));
  report.reason = capture_here(use, call, sequence, step_bytes, step, report.operations);
  for (size_t i = 0; i < before.size() && report.reason.empty(); ++i) {
    report.reason = use.parts.models[i]->reducer().why_not_replayed(before[i]);
  }
  auto reason = use.agreement.agree(report);
  if (reason.empty()) {
    try {
      step->instantiate();
    } catch (const std::exception&) {
      report.reason = capture_failure(std::current_exception(), "cudaGraphInstantiate");
    }
    reason = use.agreement.agree(report);
  }
  use.agreement.end_capture(sequence);
  return reason;
}

}  // namespace

std::unique_ptr<StepGraph> capture_step(const CaptureParts& use, StepCall& call, uint64_t sequence,
                                        int64_t step_bytes, std::string* reason) {
  const auto before = reducer_states(use.parts);
  const auto gradients_before = hash_gradients(use.parts);
  std::unique_ptr<CapturedStep> step;
  try {
    *reason = capture_on_all_ranks(use, call, sequence, step_bytes, before, step);
  } catch (...) {  // the ranks were not in the same call, or one is lost
    undo(use.parts, before);
    throw;
  }
  if (!reason->empty()) {
    // Also for another rank's reason: this rank's graph will never run.
    undo(use.parts, before);
    return nullptr;
  }
  auto after = reducer_states(use.parts);
  bool has_backward = false;
  std::vector<Reducer::Local> left;
  for (size_t i = 0; i < before.size(); ++i) {
    has_backward = has_backward || before[i].history != after[i].history;
    left.push_back(std::move(after[i].local));
  }
  if (has_backward) {
    const bool changes = gradients_before != hash_gradients(use.parts);
    step->set_backward(gradients_before, changes ? std::move(left) : std::vector<Reducer::Local>());
  }
  return step;
}

}  // namespace ddp::detail
