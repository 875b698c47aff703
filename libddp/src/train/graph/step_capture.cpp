// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_capture.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/collective_progress.hpp"
#include "core/fnv_hash.hpp"
#include "train/graph/capture_failure.hpp"

namespace ddp::detail {
namespace {

// Hashes which gradients are defined: a backward overwrites undefined gradients and accumulates
// into defined ones.
uint64_t defined_gradients(const GraphedParts& parts) {
  FnvHash hash;
  for (auto* model : parts.models) {
    for (const auto& parameter : model->named_parameters()) {
      hash.add(parameter.tensor.grad().defined() ? 1 : 2);
    }
  }
  return hash.value();
}

/// A captured step and its effect on the models' host state.
class ModelStepGraph final : public StepGraph {
 public:
  ModelStepGraph(std::unique_ptr<CapturedStep> step, const GraphedParts& parts,
                 const StepRing& ring)
      : parts_(parts), ring_(ring), step_(std::move(step)) {}

  /// For a step with a backward: `defined` are the gradients before its capture, and `after` the
  /// reducers' states after it, if other gradients are defined then.
  void set_backward(uint64_t defined, std::vector<Reducer::State> after) {
    gradients_before_ = defined;
    states_after_ = std::move(after);
  }

  bool has_backward() const override { return gradients_before_.has_value(); }
  bool gradients_match() const override {
    return !gradients_before_ || *gradients_before_ == defined_gradients(parts_);
  }
  int64_t num_nodes() const override { return step_->num_nodes(); }
  StepDone replay(StepCall& call, uint64_t sequence) override {
    step_->replay(call.numbers, sequence, call.inputs);
    for (size_t i = 0; i < states_after_.size(); ++i) {
      parts_.models[i]->reducer().restore(states_after_[i]);  // .grad as after the step
    }
    return {step_->object(), ring_.log(sequence, step_->num_scalars())};
  }

 private:
  const GraphedParts& parts_;
  const StepRing& ring_;
  std::optional<uint64_t> gradients_before_;
  std::vector<Reducer::State> states_after_;
  const std::unique_ptr<CapturedStep> step_;
};

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

}  // namespace

StepCapture::StepCapture(Context& context, const GraphedParts& parts, const StepFeed& feed,
                         const StepRing& ring, GraphPool* pool, CaptureAgreement& agreement)
    : context_(context),
      parts_(parts),
      feed_(feed),
      ring_(ring),
      pool_(pool),
      agreement_(agreement) {}

StepCapture::ReducerStates StepCapture::reducer_states() const {
  ReducerStates states;
  for (auto* model : parts_.models) {
    states.push_back(model->reducer().state());
  }
  return states;
}

std::unique_ptr<StepGraph> StepCapture::capture(StepCall& call, uint64_t sequence,
                                                int64_t step_bytes, std::string* reason) {
  const auto before = reducer_states();
  const auto defined_before = defined_gradients(parts_);
  std::unique_ptr<CapturedStep> step;
  try {
    *reason = capture_on_all_ranks(call, sequence, step_bytes, before, step);
  } catch (...) {  // the ranks were not in the same call, or one is lost
    undo(before);
    throw;
  }
  if (!reason->empty()) {
    // Also for another rank's reason: this rank's graph will never run.
    undo(before);
    return nullptr;
  }
  auto graph = std::make_unique<ModelStepGraph>(std::move(step), parts_, ring_);
  bool has_backward = false;
  for (size_t i = 0; i < before.size(); ++i) {
    has_backward = has_backward || parts_.models[i]->reducer().ran_backward_since(before[i]);
  }
  if (has_backward) {
    const bool changes = defined_before != defined_gradients(parts_);
    graph->set_backward(defined_before, changes ? reducer_states() : ReducerStates());
  }
  return graph;
}

/// Returns the first rank's reason why no rank replays; empty: all replay.
std::string StepCapture::capture_on_all_ranks(StepCall& call, uint64_t sequence, int64_t step_bytes,
                                              const ReducerStates& before,
                                              std::unique_ptr<CapturedStep>& step) {
  auto report = agreement_.begin_capture(sequence, call.numbers.variant, shapes_of(call));
  report.reason = capture_here(call, sequence, step_bytes, step, report.operations);
  for (size_t i = 0; i < before.size() && report.reason.empty(); ++i) {
    report.reason = parts_.models[i]->reducer().why_not_replayed(before[i]);
  }
  auto reason = agreement_.agree(report);
  if (reason.empty()) {
    try {
      step->instantiate();
    } catch (const std::exception&) {
      report.reason = capture_failure(std::current_exception(), "cudaGraphInstantiate");
    }
    reason = agreement_.agree(report);
  }
  agreement_.end_capture(sequence);
  return reason;
}

/// Returns the reason of a failure on this rank; empty: success.
std::string StepCapture::capture_here(StepCall& call, uint64_t sequence, int64_t step_bytes,
                                      std::unique_ptr<CapturedStep>& step,
                                      std::vector<std::string>& operations) {
  std::vector<at::Tensor> inputs_before;
  for (const at::Tensor* input : call.inputs) {
    inputs_before.push_back(*input);
  }
  free_cached_memory();
  const CollectivesInCapture collectives(communicators());
  const std::function<void()> join_counts = [&collectives] { collectives.join_counts(); };
  std::string failing;
  std::string reason;
  try {
    step = CapturedStep::capture({.feed = feed_,
                                  .ring = ring_,
                                  .pool = *pool_,
                                  .generators = parts_.generators,
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

/// Removes the host state of a capture whose graph will never run.
void StepCapture::undo(const ReducerStates& before) {
  for (size_t i = 0; i < before.size(); ++i) {
    parts_.models[i]->reducer().restore(before[i]);
  }
  if (parts_.scaler != nullptr) {
    parts_.scaler->reset_step();
  }
}

// In the same order on all ranks.
std::vector<Communicator*> StepCapture::communicators() const {
  std::vector<Communicator*> all{context_.communicator().get()};
  for (const auto* model : parts_.models) {
    auto* communicator = model->communicator().get();
    if (std::find(all.begin(), all.end(), communicator) == all.end()) {
      all.push_back(communicator);
    }
  }
  return all;
}

}  // namespace ddp::detail
