// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "comm/cuda_check.hpp"
#include "comm/nccl/collective_progress.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ops/shared/flop_counter.hpp"
#include "reduce/model/replica_check.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/graph_pool.hpp"
#include "train/graph/replay_check.hpp"
#include "train/graph/step_cache.hpp"
#include "train/graph/step_capture.hpp"
#include "train/graph/step_feed.hpp"
#include "train/graph/step_publisher.hpp"
#include "train/graph/step_runner.hpp"

namespace ddp::detail {
namespace {

/// Whether the job still runs. A replay makes no call that would notice a failure.
class JobCheck {
 public:
  explicit JobCheck(const ControlPlane& plane) : plane_(plane) {}
  /// Throws PeerLostError if the job failed.
  void operator()() const {
    if (!ended_ && plane_.failed()) {
      throw PeerLostError(plane_.failure().to_line());
    }
  }
  /// Call before the control plane closes.
  void end() { ended_ = true; }

 private:
  const ControlPlane& plane_;
  bool ended_ = false;
};

/// Throws if the device is in error; never waits.
void check_device(at::Device device) {
  const auto code = cudaStreamQuery(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  if (code != cudaErrorNotReady) {
    check_cuda(code, "a step");
  }
}

constexpr const char* kComparesCalls =
    "context.communicator.check_collectives=true compares every collective on the host; set it to "
    "false";

bool compares_calls(Communicator& communicator) {
  const auto* capturable = communicator.capturable();
  return capturable != nullptr && capturable->compares_calls();
}

// Logs hold the ring, and may be read after the GraphedStep's destruction.
std::shared_ptr<StepRing> make_ring(at::Device device, const std::weak_ptr<JobCheck>& weak) {
  return std::make_shared<StepRing>(make_mapped_slots(device), [weak, device] {
    if (const auto check_job = weak.lock()) {
      (*check_job)();
    }
    check_device(device);
  });
}

std::shared_ptr<GraphPool> pool_or_new(std::shared_ptr<GraphPool> pool, CudaGraph mode) {
  return pool == nullptr && mode != CudaGraph::Off ? std::make_shared<GraphPool>() : pool;
}

/// Runs steps on a GPU. StepCache finds the graph of a call's kind of batch, and capture_step()
/// makes it after eager steps. StepFeed sends numbers to the device, and StepRing brings the step's
/// scalars back.
///
/// Every rank decides alone whether a call captures, replays or runs eagerly. So the three call the
/// same collectives in the same order, and leave the same host's state where it decides about later
/// collectives: a replay sets what its capture left (BufferBroadcast::State), and ranks compare
/// frozen parameters once (Reducer::runs_in_graphs). A capture itself needs no other rank.
class CudaStepRunner final : public StepRunner {
 public:
  CudaStepRunner(Context& context, GraphedParts parts, GraphedStepOptions options,
                 std::shared_ptr<GraphPool> pool)
      : context_(context),
        parts_(std::move(parts)),
        options_(std::move(options)),
        device_(context.device()),
        pool_(pool_or_new(std::move(pool), options_.mode)),
        check_job_(std::make_shared<JobCheck>(context.control_plane())),
        ring_(make_ring(device_, check_job_)),
        feed_(device_),
        cache_(parts_, options_, device_, context.is_main()),
        captures_enabled_(options_.mode != CudaGraph::Off),
        uses_device_numbers_(captures_enabled_),
        replay_check_(make_replay_check(context, parts_, options_)) {
    for (auto* model : parts_.models) {
      if (captures_enabled_) {
        model->reducer().runs_in_graphs() = true;
      }
    }
  }

  StepDone run(StepCall& call) override {
    (*check_job_)();
    // Before other collectives, because a backward that threw is completed here. Finishes pending
    // buffer broadcasts too: a replay does not wait for them, and a capture must not contain the
    // wait.
    for (auto* model : parts_.models) {
      model->reducer().join_broken_backward();
      model->reducer().finish_pending();
    }
    check_replicas();
    const ReplicaCheck::Hold hold;  // replays run no Optimizer::step, so no rank checks in there
    is_checked_ = replay_check_ != nullptr && replay_check_->begin_step();
    ++sequence_;
    try {
      ring_->begin(sequence_);
      // A graph's inputs are fed by plain copies, so slices and expanded tensors are made dense
      // first.
      for (at::Tensor* input : call.inputs) {
        if (input->defined() && !input->is_non_overlapping_and_dense()) {
          *input = input->contiguous();
        }
      }
      return run_fed(call);
    } catch (...) {
      // Nothing is published under this number, so no reader may wait for it. A step that failed
      // its replay check published, and the next step overwrites its numbers.
      --sequence_;
      throw;
    }
  }

  void drop_graphs() override { cache_.clear(); }
  GraphedStepCounts counts() const override {
    auto counts = counts_;
    counts.graphs = cache_.num_graphs();
    return counts;
  }

  const std::shared_ptr<GraphPool>& pool() const override { return pool_; }
  void end() override {
    captures_enabled_ = false;
    check_job_->end();
    cache_.clear();
  }

 private:
  /// Between two steps, on all ranks after the same ones.
  void check_replicas() {
    if (parts_.optimizers.empty() || is_joining()) {
      return;
    }
    ++num_steps_;
    for (auto* model : parts_.models) {
      const auto& replicas = model->reducer().guard().replicas();
      if (replicas != nullptr && replicas->is_due(num_steps_)) {
        replicas->run([&] { return states_of(*model); }, num_steps_);
      }
    }
  }

  std::vector<OptimizerState> states_of(const DataParallelModel& model) const {
    std::vector<OptimizerState> states;
    for (const auto* optimizer : parts_.optimizers) {
      if (model.reducer().guard().owns_any(optimizer->named_parameters())) {
        states.push_back({optimizer->replicated_state(), optimizer->named_parameters()});
      }
    }
    return states;
  }

  StepDone run_fed(StepCall& call) {
    if (!captures_enabled_) {
      return run_eager(call);
    }
    ops::refresh_weight_copies();  // before the graphs, which read them, are looked up
    cache_.drop_stale();
    StepCache::Kind* kind = cache_.find(call);
    if (kind == nullptr) {
      return run_eager(call);
    }
    if (kind->graph == nullptr || is_joining()) {
      if (const auto reason = why_no_rank_captures(); !reason.empty()) {
        uses_device_numbers_ = false;
        disable_captures(reason, context_.is_main());
        return run_eager(call);
      }
      if (const auto reason = why_this_rank_captures_nothing(); !reason.empty()) {
        disable_captures(reason, /*logs=*/true);
        return run_eager(call);
      }
      const auto before = is_checked_ ? reducer_states() : ReducerStates();
      if (!may_capture(*kind) || !capture(*kind, call)) {
        return captures_enabled_ ? warm_up(*kind, call) : run_eager(call);
      }
      restore(before);  // the capture left other gradients than a check's graphs begin with
      return replay(*kind, call);
    }
    if (!kind->graph->gradients_match()) {
      return run_eager(call);
    }
    ops::detail::note_uncounted_ops();  // a replay after a capture runs what the capture started
    return replay(*kind, call);
  }

  StepDone run_eager(StepCall& call) {
    ++counts_.eager;
    const auto& numbers = call.numbers;
    StepScalars scalars{.lr = numbers.lr, .step = static_cast<double>(numbers.step)};
    feed_.feed(numbers, sequence_, call.inputs);
    if (uses_device_numbers_) {  // as in the later graph, or in those of other ranks
      scalars = feed_.scalars();
    }
    auto output = is_checked_ ? replay_check_->run_eager(call, scalars) : call.run(scalars);
    const auto logged = StepRing::scalars_of(output.tensors);
    publish(logged, feed_, *ring_);
    return {std::move(output.object), ring_->log(sequence_, static_cast<int>(logged.size()))};
  }

  StepDone warm_up(StepCache::Kind& kind, StepCall& call) {
    // The block is reserved only after the first steps. Otherwise permanent tensors (a new bucket
    // layout) would be allocated inside it.
    if (!kind.has_block && kind.all_steps() > 0 && is_settled()) {
      c10::cuda::CUDACachingAllocator::emptyCache();  // returns the first step's memory
      reserve_block(missing_bytes(device_, {0, 0}, kind.step_bytes), device_);
      kind.has_block = true;
    }
    const PeakBytes peak(device_);
    auto done = run_eager(call);
    if (!is_checked_) {  // a check takes more
      kind.step_bytes = peak.bytes();
    }
    // This step ran with the changed parts, so they must not restart the warm-up.
    cache_.drop_stale_parts();
    ++kind.eager_steps;  // a step that threw does not count
    return done;
  }

  StepDone replay(StepCache::Kind& kind, StepCall& call) {
    const TraceScope trace("graphed step", "compute");
    StepDone done;
    if (!is_checked_) {
      done = kind.graph->replay(call, sequence_);
    } else if (has_checked_graphs(kind, call)) {
      replay_check_->run([&] { kind.rehearsal->replay(call, sequence_); },
                         [&] { done = kind.recorded->replay(call, sequence_); });
    } else {
      return run_eager(call);
    }
    ++counts_.replayed;
    return done;
  }

  /// Captures them for the kind's first check. They share the memory of the kind's own graph.
  bool has_checked_graphs(StepCache::Kind& kind, StepCall& call) {
    if (!std::exchange(kind.has_tried_checked, true)) {
      const auto before = reducer_states();
      kind.rehearsal = capture_checked(call, /*is_rehearsal=*/true);
      if (kind.rehearsal != nullptr) {
        kind.recorded = capture_checked(call, /*is_rehearsal=*/false);
      }
      restore(before);
    }
    const auto fits = [](const auto& graph) {
      return graph != nullptr && graph->gradients_match();
    };
    return fits(kind.rehearsal) && fits(kind.recorded);
  }

  using ReducerStates = std::vector<Reducer::State>;  // one per model
  ReducerStates reducer_states() const {
    ReducerStates states;
    for (auto* model : parts_.models) {
      states.push_back(model->reducer().state());
    }
    return states;
  }
  void restore(const ReducerStates& states) const {
    for (size_t i = 0; i < states.size(); ++i) {
      parts_.models[i]->reducer().restore(states[i]);
    }
  }

  std::unique_ptr<StepGraph> capture_checked(StepCall& call, bool is_rehearsal) {
    const ReplayCheck::Recording recording(*replay_check_, is_rehearsal);
    std::string reason;
    auto graph = capture_step({context_, parts_, feed_, *ring_, pool_.get()}, call, sequence_,
                              /*step_bytes=*/0, &reason);
    ops::detail::note_uncounted_ops();
    if (graph == nullptr) {
      log_warning(concat("rank ", context_.rank(), ": ", options_.name,
                         " runs eagerly when train.replay_check_every checks it: ", reason));
    }
    return graph;
  }

  /// Ranks that ran out of inputs wait for a flag before each forward, which a replay does not
  /// send.
  bool is_joining() const {
    return std::any_of(parts_.models.begin(), parts_.models.end(),
                       [](DataParallelModel* model) { return model->is_joining(); });
  }

  bool is_settled() const {
    return !at::GradMode::is_enabled() ||
           std::all_of(parts_.models.begin(), parts_.models.end(),
                       [](DataParallelModel* model) { return model->reducer().is_settled(); });
  }

  bool may_capture(const StepCache::Kind& kind) const {
    const bool first = counts_.captures == 0;
    return kind.eager_steps > 0 && kind.all_steps() >= (first ? options_.warmup_steps : 1) &&
           is_settled();
  }

  /// Returns false if the capture failed. Then this and all later steps of this rank run eagerly.
  bool capture(StepCache::Kind& kind, StepCall& call) {
    // In the first step libraries search for algorithms, which takes more memory.
    const int64_t step_bytes = kind.all_steps() > 1 ? kind.step_bytes : 0;
    std::string reason;
    auto graph = capture_step({context_, parts_, feed_, *ring_, pool_.get()}, call, sequence_,
                              step_bytes, &reason);
    if (graph == nullptr) {
      disable_captures(reason, /*logs=*/true);
      ops::detail::note_uncounted_ops();  // the step runs a second time
      return false;
    }
    ++counts_.captures;
    if (context_.is_main()) {
      log_info(concat("captured ", options_.name, " as a CUDA graph: ", graph->num_nodes(),
                      " nodes, batch ", shapes_of(call)));
    }
    cache_.add_graph(kind, std::move(graph));
    return true;
  }

  /// Why this step cannot be captured on any rank, as far as known beforehand. Empty: it may be.
  std::string why_no_rank_captures() const {
    for (const auto* optimizer : parts_.optimizers) {
      if (!optimizer->capturable()) {
        return concat("the optimizer (", optimizer->state_name(),
                      ") cannot be captured, because its step reads values on the host (as "
                      "torch::optim does); use ddp::make_optimizer");
      }
    }
    for (auto* model : parts_.models) {
      if (auto reason = model->reducer().why_not_captured(); !reason.empty()) {
        return reason;
      }
      const auto& communicator = model->communicator();
      const std::string backend = communicator->backend();
      if (backend != "nccl" && backend != "single") {
        return concat("the communicator is ", backend, ", which runs its collectives on the host");
      }
      if (compares_calls(*communicator)) {
        return kComparesCalls;
      }
    }
    return compares_calls(*context_.communicator()) ? kComparesCalls : "";
  }

  /// The same of what may differ between ranks. A rank without inputs in a join calls no step.
  std::string why_this_rank_captures_nothing() const {
    if (is_joining()) {
      return "the step runs inside join(), which exchanges flags on the host before every forward";
    }
    const char* registers = std::getenv("NCCL_GRAPH_REGISTER");
    if (context_.world_size() > 1 && registers != nullptr && std::string_view(registers) != "0") {
      return concat("NCCL_GRAPH_REGISTER=", registers,
                    " is set, with which a capture may wait for other ranks; unset it");
    }
    if (c10::cuda::getCurrentCUDAStream(device_.index()) ==
        c10::cuda::getDefaultCUDAStream(device_.index())) {
      return "the current stream is the default stream, which cannot be captured; run the step in "
             "the thread that created the Context, on the stream that the Context set";
    }
    return {};
  }

  void disable_captures(const std::string& reason, bool logs) {
    captures_enabled_ = false;
    cache_.clear();
    counts_.why_eager = reason;
    if (options_.mode == CudaGraph::On) {
      throw SettingsError(concat("CUDA graphs are on (train.cuda_graph=on), but ", options_.name,
                                 " cannot be captured: ", reason,
                                 "; fix: remove this cause, or set train.cuda_graph=auto (eager "
                                 "steps) or off"));
    }
    if (logs) {
      log_warning(concat(context_.is_main() ? "" : concat("rank ", context_.rank(), ": "),
                         options_.name, " runs without a CUDA graph: ", reason));
    }
  }

  Context& context_;
  const GraphedParts parts_;
  const GraphedStepOptions options_;
  const at::Device device_;
  const std::shared_ptr<GraphPool> pool_;
  const std::shared_ptr<JobCheck> check_job_;
  const std::shared_ptr<StepRing> ring_;
  const StepFeed feed_;
  StepCache cache_;
  bool captures_enabled_;
  bool uses_device_numbers_;  // so that float64 weights get the same rate on all ranks
  const std::unique_ptr<ReplayCheck> replay_check_;  // nullptr: off
  bool is_checked_ = false;                          // the current call, by replay_check_
  int64_t num_steps_ = 0;                            // that check_replicas() counted
  uint64_t sequence_ = 0;                            // of the current or last call
  GraphedStepCounts counts_;
};

}  // namespace

std::unique_ptr<StepRunner> make_cuda_step_runner(Context& context, GraphedParts parts,
                                                  GraphedStepOptions options,
                                                  std::shared_ptr<GraphPool> pool) {
  return std::make_unique<CudaStepRunner>(context, std::move(parts), std::move(options),
                                          std::move(pool));
}

}  // namespace ddp::detail
