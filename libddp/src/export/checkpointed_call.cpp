// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing of a graph.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "export/stack_functions.hpp"
#include "ops/shared/random_states.hpp"

namespace ddp::detail {
namespace {

/// A checkpointed graph.
struct Block {
  GraphPlan plan;
  std::vector<bool> are_buffers = {};  // by input
  // Normalization writes its running statistics without a trace in their versions.
  std::vector<bool> are_statistics = {};
  std::string name;  // for messages
};

bool has_statistics(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    for (const auto& argument : node.inputs) {
      const auto* inner = argument.value.graph();
      if (argument.name.starts_with("running_") || (inner != nullptr && has_statistics(**inner))) {
        return true;
      }
    }
  }
  return false;
}

// A graph in the graph may normalize with any of its inputs.
std::set<std::string> statistics_of(const Graph& graph) {
  std::set<std::string> names;
  const auto add = [&](const std::string& name) { names.insert(name); };
  for (const auto& node : graph.nodes) {
    bool normalizes_inside = false;
    for (const auto& argument : node.inputs) {
      const auto* inner = argument.value.graph();
      normalizes_inside = normalizes_inside || (inner != nullptr && has_statistics(**inner));
      if (normalizes_inside || argument.name.starts_with("running_")) {
        visit_names(argument.value, add);
      }
    }
  }
  return names;
}

Block make_block(const Node& node, const Graph& graph) {
  Block block{.plan = GraphPlan(graph), .name = node.module.empty() ? node.name : node.module};
  const auto statistics = statistics_of(graph);
  for (const auto& input : graph.inputs) {
    const auto* name = input.name();
    block.are_buffers.push_back(name != nullptr && graph.buffers.count(name->name) != 0);
    block.are_statistics.push_back(name != nullptr && statistics.count(name->name) != 0);
  }
  return block;
}

bool is_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

const void* storage_or_null(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// What a run on copies of the inputs showed.
struct Trial {
  std::vector<bool> written;  // by input
  std::string obstacle;       // why the block cannot run again; empty: it can
};

// Schemas do not say all that a graph does with its inputs: a dropout of 0 returns its input, and
// an operator in place may follow. Overridden operators may communicate, so they are left out.
Trial try_out(const Block& block, const ValueStack& inputs, CallContext context) {
  const at::NoGradGuard no_grad;
  context.overrides = nullptr;
  std::vector<at::Tensor> copies(inputs.size()), given;
  std::vector<int64_t> versions(inputs.size());
  auto values = inputs;
  std::set<const void*> memory;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (is_tensor(inputs[i])) {
      given.push_back(inputs[i].toTensor());
      copies[i] = inputs[i].toTensor().detach().clone();
      versions[i] = copies[i]._version();
      values[i] = copies[i];
      memory.insert(storage_or_null(copies[i]));
    }
  }
  const auto random = ops::detail::RandomStates::of_devices(given);
  const ops::detail::RandomStatesAs keep(random);
  const auto outputs = block.plan.run(std::move(values), context);
  Trial trial;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_written =
        copies[i].defined() && (block.are_statistics[i] || copies[i]._version() != versions[i]);
    trial.written.push_back(is_written);
    if (is_written && !block.are_buffers[i] && !block.are_statistics[i]) {
      trial.obstacle = "it changes a value from outside";
    }
  }
  for (const auto& output : outputs) {
    if (is_tensor(output) && !memory.insert(storage_or_null(output.toTensor())).second) {
      trial.obstacle = "its results share memory with each other or with its inputs";
    }
  }
  return trial;
}

/// One call: what the second run needs beside the tensors that autograd saves.
class Call {
 public:
  Call(std::shared_ptr<const Block> block, CallContext context)
      : block_(std::move(block)), context_(std::move(context)) {}

  /// Returns the tensors among `inputs` that the graph only reads. Of the others the second run
  /// gets copies as they are now.
  std::vector<at::Tensor> take(ValueStack inputs, const std::vector<bool>& written) {
    std::vector<at::Tensor> tensors;
    inputs_ = std::move(inputs);
    copies_.resize(inputs_.size());
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!is_tensor(inputs_[i])) {
        continue;
      }
      if (written[i]) {
        copies_[i] = inputs_[i].toTensor().clone();
      } else {
        places_.push_back(i);
        tensors.push_back(inputs_[i].toTensor());
        inputs_[i] = c10::IValue();
      }
    }
    return tensors;
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors) {
    auto inputs = inputs_;
    std::vector<int64_t> versions;
    for (std::size_t k = 0; k < places_.size(); ++k) {
      inputs[places_[k]] = tensors[k];
      versions.push_back(tensors[k]._version());
    }
    for (std::size_t i = 0; ops::is_recomputing() && i < copies_.size(); ++i) {
      if (copies_[i].defined()) {
        inputs[i] = copies_[i].clone();  // a retained graph may be run again
      }
    }
    auto outputs = block_->plan.run(std::move(inputs), context_);
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      if (tensors[k]._version() != versions[k]) {
        throw SettingsError(concat("the block ", printable(block_->name),
                                   " changes a value from outside, which it did not at its first "
                                   "call, so it cannot be computed again; fix: leave it out of "
                                   "checkpoint_blocks"));
      }
    }
    return tensors_in(std::move(outputs));
  }

  /// The graph's results: `tensors` among its other values.
  ValueStack results(const std::vector<at::Tensor>& tensors) const {
    auto results = results_;
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      results[result_places_[k]] = tensors[k];
    }
    return results;
  }

 private:
  std::vector<at::Tensor> tensors_in(ValueStack outputs) {
    std::vector<at::Tensor> tensors;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (is_tensor(outputs[i])) {
        places.push_back(i);
        tensors.push_back(outputs[i].toTensor());
        outputs[i] = c10::IValue();
      }
    }
    if (!ops::is_recomputing()) {
      results_ = std::move(outputs);
      result_places_ = std::move(places);
    }
    return tensors;
  }

  std::shared_ptr<const Block> block_;
  CallContext context_;
  ValueStack inputs_, results_;                      // None where tensors go
  std::vector<std::size_t> places_, result_places_;  // of these tensors
  std::vector<at::Tensor> copies_;                   // of written inputs
};

bool needs_gradient(const ValueStack& inputs) {
  for (const auto& input : inputs) {
    if (is_tensor(input) && input.toTensor().requires_grad()) {
      return at::GradMode::is_enabled();
    }
  }
  return false;
}

// A buffer that needs a gradient, or shares memory with another input, is not changed alone.
bool changes_buffers_alone(const ValueStack& inputs, const std::vector<bool>& written) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!written[i]) {
      continue;
    }
    const auto& buffer = inputs[i].toTensor();
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      const bool shares = k != i && is_tensor(inputs[k]) &&
                          storage_or_null(inputs[k].toTensor()) == storage_or_null(buffer);
      if (shares || buffer.requires_grad()) {
        return false;
      }
    }
  }
  return true;
}

/// Calls a block, from several threads too.
class Caller {
 public:
  explicit Caller(Block block) : block_(std::make_shared<const Block>(std::move(block))) {}

  void operator()(ValueStack& stack, const CallContext& context) {
    if (stack.size() != block_->plan.num_inputs()) {
      throw DataError("its arguments do not fit the graph");
    }
    const auto* trial = needs_gradient(stack) ? &tried(stack, context) : nullptr;
    if (trial == nullptr || !trial->obstacle.empty() ||
        !changes_buffers_alone(stack, trial->written)) {
      stack = block_->plan.run(std::move(stack), context);
      return;
    }
    const auto call = std::make_shared<Call>(block_, context);
    const auto inputs = call->take(std::move(stack), trial->written);
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> body =
        [call](const std::vector<at::Tensor>& tensors) { return call->run(tensors); };
    const auto tensors = ops::checkpoint(body, inputs);
    stack = call->results(tensors);
  }

 private:
  const Trial& tried(const ValueStack& inputs, const CallContext& context) {
    const std::lock_guard lock(mutex_);
    if (!trial_) {
      trial_ = try_out(*block_, inputs, context);
      if (!trial_->obstacle.empty()) {
        log_warning(concat("checkpoint_blocks: the activations of ", printable(block_->name),
                           " are kept, because ", trial_->obstacle));
      }
    }
    return *trial_;
  }

  const std::shared_ptr<const Block> block_;
  std::mutex mutex_;
  std::optional<Trial> trial_;  // of the first call
};

}  // namespace

StackFunction checkpointed_call(const Node& node) {
  const std::shared_ptr<const Graph>* graph = nullptr;
  for (const auto& input : node.inputs) {
    if (input.value.graph() != nullptr) {
      if (graph != nullptr) {
        throw DataError("activation checkpointing takes one graph");
      }
      graph = input.value.graph();
    }
  }
  if (graph == nullptr) {
    throw DataError("activation checkpointing takes one graph");
  }
  const auto caller = std::make_shared<Caller>(make_block(node, **graph));
  return [caller](ValueStack& stack, const CallContext& context) { (*caller)(stack, context); };
}

}  // namespace ddp::detail
