// SPDX-License-Identifier: Apache-2.0
// A training step that runs as one CUDA graph. Forward, loss, backward with its reductions,
// unscale, clip, optimizer and scaler update are captured once and replayed by one launch. The same
// lambda runs eagerly on the CPU, and gives the same bits.
//
//   ddp::GraphedStep step(ctx, {.models = {&model}, .optimizers = {optimizer.get()},
//                              .scaler = &scaler},
//                         [&](const ddp::Batch& batch, const ddp::StepScalars& scalars) {
//                           model.zero_grad();
//                           torch::Tensor loss;
//                           {
//                             ddp::Autocast autocast(cfg.amp);
//                             loss = torch::cross_entropy_loss(model.forward(batch.data),
//                                                              batch.target);
//                           }
//                           scaler.scale(loss).backward();
//                           scaler.unscale_(*optimizer);
//                           auto norm = ddp::clip_grad_norm_(model, 1.0);
//                           scaler.step(*optimizer, scalars);
//                           scaler.update();
//                           return std::vector{loss, norm};
//                         });
//   for (int64_t i = 0; i < max_steps; ++i) {
//     auto result = step(loader.next(), {.lr = lr_schedule.at(i), .step = i});
//     // result.log[0] is the loss, once the host wants to wait for it
//   }
//
// One call of the lambda is one whole optimizer step, with all micro-batches of gradient
// accumulation (a batch may be a std::vector of batches). Whatever changes between steps must come
// from the arguments or from device memory, because a host number is baked into the graph. The
// lambda must not wait for the device (.item(), .cpu(), nonzero, indexing by a mask), copy from or
// to host memory, or make state that outlives it.
//
// The graph's first node copies a batch's tensors into the graph's own memory. A small float32 CPU
// tensor of the batch (a mixup weight) is sent with the scalars and is on the device inside the
// lambda. Other CPU tensors stay on the CPU, and a step with one cannot be captured.
//
// Numbers and texts in a batch (members of a tuple, elements of a vector) select a kind of batch:
// each value has its own graph. For a type with for_each_tensor, only the values that it visits
// count; the rest of the object must be the same in every step. Modes select kinds too: training or
// evaluation of each submodule, autocast and no_sync() around the step, gradients on or off. A step
// that does not clear the gradients itself is replayed if the same gradients are defined as at its
// capture; otherwise it runs eagerly.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/detail/visit_tensors.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "ddp/train/options.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

/// The objects that a step uses. All of them outlive the GraphedStep. Modules outside `models` are
/// not observed: call recapture() when their memory or modes change.
struct GraphedParts {
  std::vector<DataParallelModel*> models = {};
  std::vector<const Optimizer*> optimizers = {};
  GradScaler* scaler = nullptr;
  /// CUDA generators that the step draws from, besides the device's default one.
  std::vector<at::Generator> generators = {};
};

/// The host's numbers of one step.
struct StepNumbers {
  double lr = 0;
  int64_t step = 0;
  /// Names the kind of batch if shapes do not. With several ranks every call must use the same
  /// variant on all of them, and shapes may change only on all ranks together. If only some ranks'
  /// batches change shape (batches shared unevenly), give such steps another variant, for example
  /// the global batch size.
  int64_t variant = 0;
};

/// Memory shared by graphs that never run at the same time (training, evaluation). A graph's
/// outputs are valid until the next replay in its pool.
class GraphPool;

/// The result of one step. Its defined one-element outputs are logged for the host. It reads them
/// by position, `result.log[0]`, or by name, `result.logged(result.outputs.loss)`.
template <typename Outputs>
struct StepResult {
  /// The lambda's result. The next replay overwrites tensors of a graph.
  Outputs outputs;
  StepLog log;

  /// The logged number of one of `outputs`; none if that tensor is undefined. Throws SettingsError
  /// for a tensor that is not among them or has more than one element.
  LoggedScalar logged(const at::Tensor& output) const;
};

/// How the steps of a GraphedStep have run so far.
struct GraphedStepCounts {
  int64_t eager = 0;
  int64_t replayed = 0;
  int64_t captures = 0;
  int64_t graphs = 0;          ///< cached now
  std::string why_eager = {};  ///< why steps are not captured; empty: they are, or will be
};

namespace detail {

template <typename Function>
struct StepTypes;
template <typename OutputsT, typename BatchT>
struct StepTypes<std::function<OutputsT(const BatchT&, const StepScalars&)>> {
  using Batch = BatchT;
  using Outputs = OutputsT;
};

/// The result of one call of the lambda: the object, and the tensors inside it.
struct StepOutput {
  std::shared_ptr<const void> object;
  std::vector<at::Tensor> tensors;
};

struct StepCall {
  StepNumbers numbers;
  std::vector<at::Tensor*> inputs;    ///< the batch's tensors, which run() reads
  std::vector<int64_t> host_numbers;  ///< the batch's other contents, if known
  std::function<StepOutput(const StepScalars&)> run;
};

struct StepDone {
  std::shared_ptr<const void> object;
  StepLog log;
};

template <typename T>
void visit_known(const char* what, T& value, const TensorVisitor& visit) {
  if (!visit_tensors(value, visit)) {
    throw SettingsError(concat("GraphedStep does not know the tensors of ", what, " of type ",
                               typeid(T).name(), ": ", kDefineForEachTensor));
  }
}

/// The part of GraphedStep that does not depend on batch and output types.
class GraphedStepCore {
 public:
  GraphedStepCore(Context& context, GraphedParts parts, GraphedStepOptions options,
                  std::shared_ptr<GraphPool> pool);
  ~GraphedStepCore();
  GraphedStepCore(const GraphedStepCore&) = delete;
  GraphedStepCore& operator=(const GraphedStepCore&) = delete;

  StepDone run(StepCall& call);
  void drop_graphs();
  GraphedStepCounts counts() const;
  const std::shared_ptr<GraphPool>& pool() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // the context's teardown holds a weak reference
};

}  // namespace detail

template <typename Outputs>
LoggedScalar StepResult<Outputs>::logged(const at::Tensor& output) const {
  if (!output.defined()) {
    return {};
  }
  int count = 0;
  int index = -1;
  detail::visit_tensors(outputs, TensorVisitor([&](at::Tensor& tensor) {
                          if (detail::is_logged(tensor)) {
                            index = tensor.is_same(output) ? count : index;
                            ++count;
                          }
                        }));
  if (index < 0) {
    throw SettingsError("StepResult::logged needs a one-element tensor of the step's outputs");
  }
  return log[index];
}

/// Use from one thread. Collective: with several ranks all ranks run the same steps in the same
/// order.
///
/// A step that cannot be captured (see CudaGraph) leaves model, optimizer and scaler unchanged,
/// because capturing executes nothing. With CudaGraph::On the first such call throws SettingsError
/// on every rank, naming the operation and the reason. With Auto the reason is logged once, and
/// this and all later steps run eagerly.
///
/// Graphs are re-captured after a parameter's memory moved (also a frozen one's), requires_grad
/// changed, an optimizer's state was loaded, or the scaler's factors or interval were set. With
/// gradients enabled, a new bucket layout of a model re-captures too: a step that reads gradients
/// must enable them. Graphs are destroyed before the communicators of `context`.
template <typename BatchT, typename Outputs>
class GraphedStep {
 public:
  using Function = std::function<Outputs(const BatchT&, const StepScalars&)>;

  /// Throws SettingsError for options out of range, and for CudaGraph::On without a GPU.
  GraphedStep(Context& context, GraphedParts parts, Function step, GraphedStepOptions options = {},
              std::shared_ptr<GraphPool> pool = nullptr)
      : step_(std::move(step)),
        core_(context, std::move(parts), std::move(options), std::move(pool)) {}

  /// Runs one step on `batch`. The host waits only if it is StepLog::kMaxStepsAhead steps ahead.
  StepResult<Outputs> operator()(BatchT batch, const StepNumbers& numbers) {
    detail::StepCall call{.numbers = numbers, .inputs = {}, .host_numbers = {}, .run = {}};
    detail::visit_known(
        "a batch", batch,
        TensorVisitor([&](at::Tensor& tensor) { call.inputs.push_back(&tensor); },
                      [&](int64_t number) { call.host_numbers.push_back(number); }));
    call.run = [&](const StepScalars& scalars) {
      auto outputs = std::make_shared<Outputs>(step_(batch, scalars));
      detail::StepOutput output{outputs, {}};
      detail::visit_known("the step's result", *outputs, TensorVisitor([&](at::Tensor& tensor) {
                            // Autograd graphs of outputs would keep every activation of the step.
                            // Outputs that the lambda keeps stay unchanged.
                            if (tensor.defined() && tensor.requires_grad() && !tensor.is_leaf()) {
                              tensor = tensor.detach();
                            }
                            output.tensors.push_back(tensor);
                          }));
      return output;
    };
    auto done = core_.run(call);
    return {*static_cast<const Outputs*>(done.object.get()), done.log};
  }

  /// Drops all graphs: the next steps warm up and capture again. For changes that the GraphedStep
  /// cannot detect (a setting that the lambda read at capture).
  void recapture() { core_.drop_graphs(); }

  GraphedStepCounts counts() const { return core_.counts(); }
  /// For another GraphedStep that never runs at the same time.
  const std::shared_ptr<GraphPool>& pool() const { return core_.pool(); }

 private:
  Function step_;
  detail::GraphedStepCore core_;
};

/// The lambda's batch and output types.
template <typename Step, typename... Rest>
GraphedStep(Context&, GraphedParts, Step, Rest...) -> GraphedStep<
    typename detail::StepTypes<decltype(std::function(std::declval<Step>()))>::Batch,
    typename detail::StepTypes<decltype(std::function(std::declval<Step>()))>::Outputs>;

}  // namespace ddp
