// SPDX-License-Identifier: Apache-2.0
// A training step that runs as one CUDA graph. Forward, loss, backward with its reductions,
// unscale, clip, optimizer and scaler update are captured once and replayed by one launch. The same
// lambda runs eagerly on the CPU, and gives the same bits.
//
//   ddp::GraphedStep step(ctx, {.models = {&model}, .optimizers = {optimizer.get()}},
//                         [&](const ddp::Batch& batch, const ddp::StepScalars& scalars) {
//                           model.zero_grad();
//                           auto loss = torch::cross_entropy_loss(model.forward(batch.data),
//                                                                 batch.target);
//                           loss.backward();
//                           auto norm = ddp::clip_grad_norm_(model, 1.0);
//                           optimizer->step(scalars);
//                           return std::vector{loss, norm};
//                         });
//   for (int64_t i = 0; i < max_steps; ++i) {
//     auto result = step(loader.next(), {.lr = lr_schedule.at(i), .step = i});
//     // result.log[0] is the loss, once the host wants to wait for it
//   }
//
// One call of the lambda is one whole optimizer step, with all micro-batches of gradient
// accumulation (a batch may be a std::vector of batches). Values that change between steps must be
// arguments or device tensors, because the graph keeps the host values of the capture. libddp sees
// only what for_each_tensor visits. Other members of a batch must be the same in every step. The
// lambda must not wait for the device (.item(), .cpu(), nonzero, indexing by a mask). It must not
// copy from or to host memory, or make state that outlives the call. docs/semantics_graphs.md
// lists what has a graph of its own, what cannot be captured and what drops graphs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/detail/graphed_step_core.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "ddp/train/options.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

/// The objects that a step uses. All of them outlive the GraphedStep.
struct GraphedParts {
  std::vector<DataParallelModel*> models = {};    ///< whose forwards and backwards run in the step
  std::vector<const Optimizer*> optimizers = {};  ///< that step in it
  GradScaler* scaler = nullptr;                   ///< nullptr without mixed precision in fp16
  std::vector<at::Generator> generators = {};     ///< CUDA generators besides the device's default
};

/// Numbers of one step: they may change without a new capture.
struct StepNumbers {
  double lr = 0;     ///< becomes StepScalars::lr
  int64_t step = 0;  ///< becomes StepScalars::step
};

/// Memory shared by graphs that never run at the same time (training, evaluation).
class GraphPool;

/// The result of one step. Its defined one-element outputs are logged for the host. Read them with
/// `result.log[0]`, or with `result.logged(result.outputs.loss)`.
template <typename Outputs>
struct StepResult {
  /// The lambda's result. A graph's outputs are valid until the next replay in its pool.
  Outputs outputs;
  StepLog log;  ///< the outputs' numbers, in their order

  /// The logged number of one of `outputs`; none if that tensor is undefined. Throws SettingsError
  /// for a tensor that is not among them or has more than one element.
  LoggedScalar logged(const at::Tensor& output) const {
    return detail::logged_output(outputs, log, output);
  }
};

/// What a GraphedStep has done so far.
struct GraphedStepCounts {
  int64_t eager = 0;           ///< steps that ran eagerly
  int64_t replayed = 0;        ///< steps that replayed a graph
  int64_t captures = 0;        ///< successful ones
  int64_t graphs = 0;          ///< cached now
  std::string why_eager = {};  ///< why no step is captured; empty if it can be
};

/// Use from one thread. Collective if the step calls collectives: all ranks run the same steps in
/// the same order. Their batches may differ: each rank decides by itself whether it captures,
/// replays or runs eagerly, and waits for no other rank.
///
/// A failed capture leaves model, optimizer and scaler unchanged. With CudaGraph::On the first such
/// call throws SettingsError, naming the operation and the reason. With Auto the reason is logged
/// once, and this and all later steps run eagerly on this rank.
template <typename BatchT, typename Outputs>
class GraphedStep {
 public:
  using Function = std::function<Outputs(const BatchT&, const StepScalars&)>;  ///< one whole step

  /// Throws SettingsError for options out of range, and for CudaGraph::On without a GPU.
  GraphedStep(Context& context, GraphedParts parts, Function step, GraphedStepOptions options = {},
              std::shared_ptr<GraphPool> pool = nullptr)
      : step_(std::move(step)),
        core_(context, std::move(parts), std::move(options), std::move(pool)) {}

  /// Runs one step on `batch`. The host waits only if it is StepLog::kMaxStepsAhead steps ahead.
  StepResult<Outputs> operator()(BatchT batch, const StepNumbers& numbers) {
    const auto done = detail::run_step<Outputs>(core_, step_, batch, numbers);
    return {*static_cast<const Outputs*>(done.object.get()), done.log};
  }

  /// Drops all graphs: the next steps warm up and capture again. For changes that are not detected:
  /// replaced buffers, modules outside `models`, values that the lambda read at capture.
  void recapture() { core_.drop_graphs(); }

  GraphedStepCounts counts() const { return core_.counts(); }  ///< so far
  /// The memory to pass to another GraphedStep that never runs at the same time.
  const std::shared_ptr<GraphPool>& pool() const { return core_.pool(); }

 private:
  Function step_;
  detail::GraphedStepCore core_;
};

/// Takes the template's arguments from the lambda.
template <typename Step, typename... Rest>
GraphedStep(Context&, GraphedParts, Step, Rest...) -> GraphedStep<
    typename detail::StepTypes<decltype(std::function(std::declval<Step>()))>::Batch,
    typename detail::StepTypes<decltype(std::function(std::declval<Step>()))>::Outputs>;

}  // namespace ddp
