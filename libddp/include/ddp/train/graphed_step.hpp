// SPDX-License-Identifier: Apache-2.0
// A training step that runs as one CUDA graph: forward, loss, backward with its reductions,
// unscale, clip, optimizer and scaler update are captured once and replayed by one launch. The same
// lambda runs eagerly on the CPU, and gives the same bits.
//
//   ddp::GraphedStep step(ctx, {.models = {&model}, .optimizers = {&optimizer}, .scaler = &scaler},
//                         [&](const ddp::Batch& batch, const ddp::StepScalars& scalars) {
//                           model.zero_grad();
//                           torch::Tensor loss;
//                           {
//                             ddp::Autocast autocast(cfg.amp);
//                             loss = torch::cross_entropy_loss(model.forward(batch.data),
//                                                              batch.target);
//                           }
//                           scaler.scale(loss).backward();
//                           scaler.unscale_(optimizer);
//                           auto norm = ddp::clip_grad_norm_(model, 1.0);
//                           scaler.step(optimizer, scalars);
//                           scaler.update();
//                           return std::vector{loss, norm};
//                         });
//   for (int64_t i = 0; i < max_steps; ++i) {
//     auto result = step(loader.next(), {.lr = lr_schedule.at(i), .step = i});
//     // result.log[0] is the loss, once the host wants to wait for it
//   }
//
// The lambda sees one whole optimizer step, with all micro-batches of gradient accumulation in it
// (a batch may be a std::vector of batches). It reads what changes from step to step from its
// arguments and from device memory alone: a number of the host is burned into the graph. It must
// not wait for the device (.item(), .cpu(), nonzero, indexing by a mask), copy from or to host
// memory, or make state that outlives it.
//
// Tensors of a batch are copied into the graph's own memory by the graph's first node. A float32
// tensor of the batch that is on the CPU with few elements (a mixup weight) travels with the
// scalars and is on the device inside the lambda; others stay on the CPU, and a step with such a
// one cannot be captured.
//
// Numbers and texts in a batch (members of a tuple, elements of a vector) make kinds of batches:
// each value has a graph of its own. Of a type with for_each_tensor they are those that it visits;
// what else such a type holds must be the same in every step. Modes make kinds too: training or
// evaluation of each submodule, autocast and no_sync() around the step, gradients on or off. A step
// that does not clear the gradients itself is replayed where the same ones are defined as when it
// was captured, and runs eagerly elsewhere.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ddp/amp/grad_scaler.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "ddp/train/graphed_step_options.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

/// What a step works on. All of it outlives the GraphedStep. Of a module that the step uses and
/// that is in none of the models nothing is seen: call recapture() where its memory or modes
/// change.
struct GraphedParts {
  std::vector<DataParallelModel*> models = {};
  std::vector<const Optimizer*> optimizers = {};
  GradScaler* scaler = nullptr;
  /// CUDA generators besides the device's default one that the step draws from.
  std::vector<at::Generator> generators = {};
};

/// The host's numbers of one step.
struct StepNumbers {
  double lr = 0;
  int64_t step = 0;
  /// Names the kind of batch where shapes alone do not. With several ranks every call must meet the
  /// same variant on all of them, and shapes may change only together: where one rank's batch has
  /// another shape than before and another rank's has not (batches shared unevenly), give such
  /// steps another variant, for example the global batch size.
  int64_t variant = 0;
};

/// Memory that several graphs use one after the other: steps that never run at the same time
/// (training, evaluation). What a graph returned is valid until the next replay in its pool.
class GraphPool;

template <typename Outputs>
struct StepResult {
  /// What the lambda returned. Tensors of a graph: the next replay overwrites them.
  Outputs outputs;
  StepLog log;
};

/// How a GraphedStep's steps were run so far.
struct GraphedStepCounts {
  int64_t eager = 0;
  int64_t replayed = 0;
  int64_t captures = 0;
  int64_t graphs = 0;          ///< kept now
  std::string why_eager = {};  ///< why it does not capture; empty: it does, or will
};

namespace detail {

template <typename Function>
struct StepTypes;
template <typename OutputsT, typename BatchT>
struct StepTypes<std::function<OutputsT(const BatchT&, const StepScalars&)>> {
  using Batch = BatchT;
  using Outputs = OutputsT;
};

/// What the lambda returned in one call: the object, and the tensors inside it.
struct StepOutput {
  std::shared_ptr<const void> object;
  std::vector<at::Tensor> tensors;
};

struct StepCall {
  StepNumbers numbers;
  std::vector<at::Tensor*> inputs;    ///< the batch's tensors, which run() reads
  std::vector<int64_t> host_numbers;  ///< the batch's other contents, as far as they are known
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

/// The part of GraphedStep that does not depend on the types of batch and outputs.
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
  std::shared_ptr<State> state_;  // the context's teardown holds it weakly
};

}  // namespace detail

/// One thread. Collective: with several ranks all of them run the same steps in the same order.
///
/// A step that cannot be captured (see CudaGraph) leaves model, optimizer and scaler as they were:
/// capturing executes nothing. With CudaGraph::On the first such call throws SettingsError naming
/// the operation and the reason on every rank; with Auto the reason is logged once and the step
/// runs eagerly, as all later ones do.
///
/// Graphs are captured anew when the memory of a parameter (a frozen one too) moved, requires_grad
/// changed, an optimizer's state was loaded or the scaler's factors or interval were set; where
/// gradients are enabled also when a model's buckets were laid out anew: a step that reads
/// gradients has to enable them. They end before the communicators of `context` do.
template <typename BatchT, typename Outputs>
class GraphedStep {
 public:
  using Function = std::function<Outputs(const BatchT&, const StepScalars&)>;

  /// Throws SettingsError for options out of range, and for CudaGraph::On without a GPU.
  GraphedStep(Context& context, GraphedParts parts, Function step, GraphedStepOptions options = {},
              std::shared_ptr<GraphPool> pool = nullptr)
      : step_(std::move(step)),
        core_(context, std::move(parts), std::move(options), std::move(pool)) {}

  /// Runs one step on `batch`. The host does not wait, unless it is StepLog::kMaxStepsAhead ahead.
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
                            // What the lambda keeps of the outputs stays as it is.
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

  /// Forgets all graphs: the next steps warm up and capture again. For changes that it cannot see
  /// (a setting that the lambda read when it was captured).
  void recapture() { core_.drop_graphs(); }

  GraphedStepCounts counts() const { return core_.counts(); }
  /// For another GraphedStep that never runs at the same time.
  const std::shared_ptr<GraphPool>& pool() const { return core_.pool(); }

 private:
  Function step_;
  detail::GraphedStepCore core_;
};

/// The types of batch and outputs are those of the lambda.
template <typename Step, typename... Rest>
GraphedStep(Context&, GraphedParts, Step, Rest...) -> GraphedStep<
    typename detail::StepTypes<decltype(std::function(std::declval<Step>()))>::Batch,
    typename detail::StepTypes<decltype(std::function(std::declval<Step>()))>::Outputs>;

}  // namespace ddp
