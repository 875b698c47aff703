// SPDX-License-Identifier: Apache-2.0
// The parts of GraphedStep that do not depend on batch and output types, and how a call reaches
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/visit_tensors.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

class Context;
class GraphPool;
struct GraphedParts;
struct GraphedStepCounts;
struct GraphedStepOptions;
struct StepNumbers;

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
  const StepNumbers& numbers;
  std::vector<at::Tensor*> inputs;    ///< the batch's tensors, which run() reads
  std::vector<int64_t> host_numbers;  ///< the batch's other contents, if known
  std::function<StepOutput(const StepScalars&)> run;
};

struct StepDone {
  std::shared_ptr<const void> object;
  StepLog log;
};

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

/// Runs `step(batch, scalars)`, which returns `Outputs`, as one call of `core`.
template <typename Outputs, typename Step, typename BatchT>
StepDone run_step(GraphedStepCore& core, const Step& step, BatchT& batch,
                  const StepNumbers& numbers) {
  static_assert(knows_tensors<BatchT>(),
                "ddp::GraphedStep does not know the tensors of its batch: define "
                "for_each_tensor(MyBatch&, const ddp::TensorVisitor&) beside the type");
  static_assert(knows_tensors<Outputs>(),
                "ddp::GraphedStep does not know the tensors of the step's result: define "
                "for_each_tensor(MyResult&, const ddp::TensorVisitor&) beside the type");
  StepCall call{.numbers = numbers, .inputs = {}, .host_numbers = {}, .run = {}};
  visit_tensors(batch, TensorVisitor([&](at::Tensor& tensor) { call.inputs.push_back(&tensor); },
                                     [&](int64_t number) { call.host_numbers.push_back(number); }));
  call.run = [&](const StepScalars& scalars) {
    auto outputs = std::make_shared<Outputs>(step(batch, scalars));
    StepOutput output{outputs, {}};
    visit_tensors(*outputs, TensorVisitor([&](at::Tensor& tensor) {
      // Autograd graphs of outputs would keep every activation of the step. Outputs
      // that the lambda keeps stay unchanged.
      if (tensor.defined() && tensor.requires_grad() && !tensor.is_leaf()) {
        tensor = tensor.detach();
      }
      output.tensors.push_back(tensor);
    }));
    return output;
  };
  return core.run(call);
}

/// Whether the host gets this output of a step.
inline bool is_logged(const at::Tensor& output) {
  return output.defined() && output.numel() == 1;
}

/// StepResult::logged.
template <typename Outputs>
LoggedScalar logged_output(const Outputs& outputs, const StepLog& log, const at::Tensor& output) {
  if (!output.defined()) {
    return {};
  }
  int count = 0;
  int index = -1;
  visit_tensors(outputs, TensorVisitor([&](at::Tensor& tensor) {
                  if (is_logged(tensor)) {
                    index = tensor.is_same(output) ? count : index;
                    ++count;
                  }
                }));
  if (index < 0) {
    throw SettingsError("StepResult::logged needs a one-element tensor of the step's outputs");
  }
  return log[index];
}

}  // namespace detail
}  // namespace ddp
