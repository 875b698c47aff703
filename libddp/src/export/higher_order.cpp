// SPDX-License-Identifier: Apache-2.0
// Operators that run graphs: regions with another mode, and control flow.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "export/stack_functions.hpp"

namespace ddp::detail {
namespace {

using Graphs = std::vector<std::shared_ptr<const GraphPlan>>;

void require(bool fits) {
  if (!fits) {
    throw DataError("its arguments do not fit the higher-order operator");
  }
}

ValueStack run(const GraphPlan& graph, ValueStack inputs, const CallContext& context) {
  require(inputs.size() == graph.num_inputs());
  return graph.run(std::move(inputs), context);
}

// Moves the elements of a list argument behind `values`.
void append_list(const c10::IValue& list, ValueStack& values) {
  require(list.isList());
  for (const auto& value : list.toListRef()) {
    values.push_back(value);
  }
}

ValueStack from(ValueStack& stack, std::size_t first) {
  require(stack.size() >= first);
  return {std::make_move_iterator(stack.begin() + static_cast<std::ptrdiff_t>(first)),
          std::make_move_iterator(stack.end())};
}

// torch.autocast(...) for a lifetime.
class AutocastRegion {
 public:
  AutocastRegion(at::DeviceType device, std::optional<at::ScalarType> dtype, bool enabled,
                 bool cache)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        old_dtype_(at::autocast::get_autocast_dtype(device)),
        had_cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_enabled(device, enabled);
    if (dtype) {
      at::autocast::set_autocast_dtype(device, *dtype);
    }
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  ~AutocastRegion() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, old_dtype_);
    at::autocast::set_autocast_cache_enabled(had_cache_);
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType old_dtype_;
  bool had_cache_;
};

// wrap_with_set_grad_enabled(enabled, graph, *inputs)
void with_grad_mode(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  require(!stack.empty() && stack[0].isBool());
  const at::AutoGradMode mode(stack[0].toBool());
  stack = run(*graphs[0], from(stack, 1), context);
}

// wrap_with_autocast(device_type, dtype, enabled, cache_enabled, graph, *inputs). A region of the
// export's device follows the module. In Python one of another device has no effect.
void with_autocast(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  require(stack.size() >= 4 && stack[0].isString() && stack[2].isBool());
  const auto device = at::Device(stack[0].toStringRef()).type();
  if (device != context.export_device && device != context.device.type()) {
    stack = run(*graphs[0], from(stack, 4), context);
    return;
  }
  const bool cache =
      stack[3].isNone() ? at::autocast::is_autocast_cache_enabled() : stack[3].toBool();
  const AutocastRegion region(context.device.type(), stack[1].toOptional<at::ScalarType>(),
                              stack[2].toBool(), cache);
  stack = run(*graphs[0], from(stack, 4), context);
}

// strict_mode(graph, inputs)
void plain_call(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  ValueStack inputs;
  for (auto& value : stack) {
    if (value.isList() && stack.size() == 1) {
      append_list(value, inputs);
    } else {
      inputs.push_back(std::move(value));
    }
  }
  stack = run(*graphs[0], std::move(inputs), context);
}

// invoke_subgraph(graph, identifier, *inputs)
void invoke(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  stack = run(*graphs[0], from(stack, 1), context);
}

bool truth(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item().toBool() : value.toBool();
}

// cond(predicate, true_graph, false_graph, inputs)
void cond(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  require(stack.size() == 2 && graphs.size() == 2);
  ValueStack inputs;
  append_list(stack[1], inputs);
  stack = run(*graphs[truth(stack[0]) ? 0 : 1], std::move(inputs), context);
}

// while_loop(condition_graph, body_graph, carried, additional)
void while_loop(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  require(stack.size() == 2 && graphs.size() == 2);
  ValueStack carried, additional;
  append_list(stack[0], carried);
  append_list(stack[1], additional);
  const auto inputs = [&] {
    auto values = carried;
    values.insert(values.end(), additional.begin(), additional.end());
    return values;
  };
  const auto goes_on = [&] {
    const auto condition = run(*graphs[0], inputs(), context);
    require(condition.size() == 1);
    return truth(condition[0]);
  };
  bool has_run = false;
  for (; goes_on(); has_run = true) {
    carried = run(*graphs[1], inputs(), context);
  }
  for (auto& value : carried) {  // as in Python, results are never the inputs themselves
    if (!has_run && value.isTensor()) {
      value = value.toTensor().clone();
    }
  }
  stack = std::move(carried);
}

std::vector<at::Tensor> tensors_of(const c10::IValue& list) {
  ValueStack values;
  append_list(list, values);
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    tensors.push_back(value.toTensor());
  }
  return tensors;
}

// Runs `graph` for each row of `mapped`: inputs are what `carried` holds, the rows and
// `additional`. The first results replace `carried`, the others are stacked.
void for_rows(const GraphPlan& graph, ValueStack& carried, const std::vector<at::Tensor>& mapped,
              const ValueStack& additional, ValueStack& results, const CallContext& context) {
  require(!mapped.empty() && mapped[0].dim() > 0);
  std::vector<std::vector<at::Tensor>> rows;
  for (int64_t i = 0; i < mapped[0].size(0); ++i) {
    auto inputs = carried;
    for (const auto& tensor : mapped) {
      inputs.emplace_back(tensor.select(0, i));
    }
    inputs.insert(inputs.end(), additional.begin(), additional.end());
    const auto outputs = run(graph, std::move(inputs), context);
    require(outputs.size() >= carried.size());
    rows.resize(outputs.size() - carried.size());
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (k < carried.size()) {
        carried[k] = outputs[k];
      } else {
        rows[k - carried.size()].push_back(outputs[k].toTensor());
      }
    }
  }
  results = carried;
  for (const auto& parts : rows) {
    results.emplace_back(at::stack(parts));
  }
}

// scan(graph, initial, mapped, additional)
void scan(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  require(stack.size() == 3);
  ValueStack carried, additional;
  append_list(stack[0], carried);
  append_list(stack[2], additional);
  for_rows(*graphs[0], carried, tensors_of(stack[1]), additional, stack, context);
}

// map_impl(graph, mapped, additional)
void map(const Graphs& graphs, ValueStack& stack, const CallContext& context) {
  require(stack.size() == 2);
  ValueStack carried, additional;
  append_list(stack[1], additional);
  for_rows(*graphs[0], carried, tensors_of(stack[0]), additional, stack, context);
}

using Implementation = void (*)(const Graphs&, ValueStack&, const CallContext&);
const std::map<std::string_view, Implementation> kImplementations = {
    {"wrap_with_set_grad_enabled", with_grad_mode},
    {"wrap_with_autocast", with_autocast},
    {"wrap", plain_call},
    {"strict_mode", plain_call},
    {"invoke_subgraph", invoke},
    {"cond", cond},
    {"while_loop", while_loop},
    {"scan", scan},
    {"map_impl", map},
};

}  // namespace

StackFunction higher_order_function(const Node& node) {
  const std::string_view target(node.target);
  const auto name = target.substr(target.rfind('.') + 1);
  if (name == "tag_activation_checkpoint" || name == "wrap_activation_checkpoint") {
    return checkpointed_call(node);
  }
  const auto found = kImplementations.find(name);
  if (found == kImplementations.end()) {
    throw DataError(
        "libddp does not run this higher-order operator; fix: write the model without it");
  }
  Graphs graphs;
  for (const auto& input : node.inputs) {
    if (const auto* graph = input.value.graph()) {
      graphs.push_back(std::make_shared<const GraphPlan>(**graph));
    }
  }
  require(!graphs.empty());
  return [graphs = std::move(graphs), implementation = found->second](ValueStack& stack,
                                                                      const CallContext& context) {
    implementation(graphs, stack, context);
  };
}

}  // namespace ddp::detail
