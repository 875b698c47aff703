// SPDX-License-Identifier: Apache-2.0
// Captures of a step, the ranks' agreement about them, and replays.
#include <algorithm>

#include "comm/operation_log.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "train/captured_graph.hpp"
#include "train/graphed_step_state.hpp"

namespace ddp::detail {

StepDone GraphedStepCore::State::run_cuda(StepCall& call) {
  check_job();
  ++sequence;
  try {
    ring->begin(sequence);
    // A graph's inputs are fed by plain copies, so slices and expanded tensors are made dense
    // first.
    for (at::Tensor* input : call.inputs) {
      if (input->defined() && !input->is_non_overlapping_and_dense()) {
        *input = input->contiguous();
      }
    }
    for (auto* model : parts.models) {
      model->reducer().join_broken_backward();
      // A graph neither waits for pending broadcasts nor may capture the wait.
      model->reducer().finish_pending();
    }
    auto done = run_numbered(call);
    calls_done = sequence;  // who waits for its numbers is told if another rank captures it
    return done;
  } catch (...) {
    --sequence;  // nothing was published under it, and nobody may wait for it
    throw;
  }
}

StepDone GraphedStepCore::State::run_numbered(StepCall& call) {
  if (!wanted) {
    return run_eager(call);
  }
  drop_stale_graphs();
  make_key(call);
  Entry* entry = find_entry(call);
  if (entry == nullptr) {
    warn_of_kinds(call);
    return run_eager(call);
  }
  if (board != nullptr) {
    last_shapes = entry->shapes;
  }
  if (entry->graph == nullptr) {
    if (const auto reason = why_not(); !reason.empty()) {
      give_up(reason);
      return run_eager(call);
    }
    if (!may_capture(*entry) || !capture(*entry, call)) {
      return wanted ? warm_up(*entry, call) : run_eager(call);
    }
    return replay(*entry, call);
  }
  return begins_alike(*entry) ? replay(*entry, call) : run_eager(call);
}

// A backward captured with undefined gradients overwrites them; with defined gradients it
// accumulates.
bool GraphedStepCore::State::begins_alike(const Entry& entry) const {
  return !entry.gradients_before || *entry.gradients_before == defined_gradients();
}

/// Call after a capture; `states` and `before` are from before the capture.
void GraphedStepCore::State::note_gradients(Entry& entry, const HostStates& states,
                                            uint64_t before) const {
  const auto has_run = [&](size_t i) {
    return parts.models[i]->reducer().ran_backward_since(states[i]);
  };
  for (size_t i = 0; i < states.size() && !entry.gradients_before; ++i) {
    entry.gradients_before = has_run(i) ? std::optional(before) : std::nullopt;
  }
  entry.trains = entry.trains || entry.gradients_before.has_value();
  if (entry.gradients_before && before != defined_gradients()) {
    for (auto* model : parts.models) {
      entry.states_after.push_back(model->reducer().state());
    }
  }
}

StepDone GraphedStepCore::State::warm_up(Entry& entry, StepCall& call) {
  // Not earlier: lasting allocations of a step (a new bucket layout) would stay in the block
  // forever.
  if (!entry.has_block && entry.all_steps() > 0 && is_settled()) {
    free_cached_memory();  // of the first step
    take_as_one_block(missing_bytes(device, {0, 0}, entry.step_bytes), device);
    entry.has_block = true;
  }
  const PeakBytes peak(device);
  auto done = run_eager(call);
  entry.step_bytes = peak.taken();
  drop_graphs_of_changed_parts();  // what this step followed, the next one need not
  ++entry.eager_steps;             // one that threw made nothing ready
  return done;
}

StepDone GraphedStepCore::State::replay(Entry& entry, StepCall& call) {
  const TraceScope trace("graphed step", "compute");
  entry.graph->replay(call.numbers, sequence, call.inputs);
  ++counts.replayed;
  for (size_t i = 0; i < entry.states_after.size(); ++i) {
    parts.models[i]->reducer().restore(entry.states_after[i]);  // .grad as after the step
  }
  return {entry.graph->object(), ring->log(sequence, entry.graph->num_scalars())};
}

// In the same order on all ranks.
std::vector<Communicator*> GraphedStepCore::State::communicators() const {
  std::vector<Communicator*> all{context.communicator().get()};
  for (const auto* model : parts.models) {
    auto* communicator = model->communicator().get();
    if (std::find(all.begin(), all.end(), communicator) == all.end()) {
      all.push_back(communicator);
    }
  }
  return all;
}

/// Returns the reason of a failure on this rank; empty: success.
std::string GraphedStepCore::State::try_capture(Entry& entry, StepCall& call,
                                                std::vector<std::string>* operations) {
  const auto inputs_before = [&] {
    std::vector<at::Tensor> inputs;
    for (const at::Tensor* input : call.inputs) {
      inputs.push_back(*input);
    }
    return inputs;
  }();
  free_cached_memory();
  const auto all = communicators();
  std::vector<int64_t> before;
  std::vector<OperationLog*> logs;
  for (auto* communicator : all) {
    before.push_back(communicator->num_operations());
    logs.push_back(dynamic_cast<OperationLog*>(communicator));
    if (logs.back() != nullptr) {
      logs.back()->hold_counts();  // the optimizer need not wait for the counts
    }
  }
  const auto join_counts = [&] {
    for (auto* log : logs) {
      if (log != nullptr) {
        log->join_counts();
      }
    }
  };
  // In the first step libraries search for algorithms, which takes more memory.
  const int64_t step_bytes = entry.all_steps() > 1 ? entry.step_bytes : 0;
  std::string failing;
  std::string reason;
  try {
    entry.graph = CapturedStep::capture({.feed = *feed,
                                         .ring = *ring,
                                         .pool = *pool,
                                         .generators = parts.generators,
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
  for (size_t i = 0; i < all.size(); ++i) {
    if (const auto* log = logs[i]) {
      const auto captured = log->captured_operations(before[i]);
      operations->insert(operations->end(), captured.begin(), captured.end());
    }
  }
  // The replay or the eager step reads the batch itself.
  for (size_t i = 0; i < inputs_before.size(); ++i) {
    *call.inputs[i] = inputs_before[i];
  }
  return reason;
}

/// Returns the first rank's reason on all ranks; empty: all captured the same collectives.
std::string GraphedStepCore::State::agree(const CaptureReport& report) const {
  if (!options.collective && report.reason.empty() && !report.operations.empty()) {
    return "it calls collectives, although GraphedStepOptions::collective is false";
  }
  if (context.world_size() == 1 || !options.collective) {
    return report.reason;
  }
  return compare_captures(context.control_plane().all_gather(encode(report)),
                          static_cast<size_t>(context.rank()), options.name);
}

/// Removes the host state of a capture whose graph will never run.
void GraphedStepCore::State::undo_capture(Entry& entry, const HostStates& states) {
  for (size_t i = 0; i < states.size(); ++i) {
    parts.models[i]->reducer().restore(states[i]);
  }
  if (parts.scaler != nullptr) {
    parts.scaler->reset_step();
  }
  entry.graph.reset();
}

/// Captures on all ranks. Returns the first rank's reason why no rank replays; empty: all replay.
std::string GraphedStepCore::State::capture_together(Entry& entry, StepCall& call,
                                                     const HostStates& states) {
  CaptureReport report{.step_id = id,
                       .call = static_cast<int64_t>(sequence),
                       .variant = call.numbers.variant,
                       .shapes = shapes_of(call)};
  if (board != nullptr) {
    board->post_note(encode(report));
  }
  report.reason = try_capture(entry, call, &report.operations);
  for (size_t i = 0; i < states.size() && report.reason.empty(); ++i) {
    report.reason = parts.models[i]->reducer().why_not_replayed(states[i]);
  }
  auto reason = agree(report);
  if (reason.empty()) {
    try {
      entry.graph->instantiate();
    } catch (const std::exception&) {
      report.reason = capture_failure(std::current_exception(), "cudaGraphInstantiate");
    }
    reason = agree(report);
  }
  last_captured = sequence;
  return reason;
}

/// False: this step must run eagerly, and all others too if give_up() was called.
bool GraphedStepCore::State::capture(Entry& entry, StepCall& call) {
  HostStates states;
  for (auto* model : parts.models) {
    states.push_back(model->reducer().state());
  }
  const auto gradients_before = defined_gradients();
  std::string reason;
  try {
    reason = capture_together(entry, call, states);
  } catch (...) {  // the ranks were not in the same call, or one is lost
    undo_capture(entry, states);
    throw;
  }
  if (!reason.empty()) {
    // Also for another rank's reason: this rank's graph will never run.
    undo_capture(entry, states);
    give_up(reason);
    return false;
  }
  note_gradients(entry, states, gradients_before);
  ++counts.captures;
  ++counts.graphs;
  if (context.is_main()) {
    log_info(concat(options.name, " is a CUDA graph now: ", entry.graph->num_nodes(),
                    " nodes, batch ", shapes_of(call)));
  }
  return true;
}

}  // namespace ddp::detail
