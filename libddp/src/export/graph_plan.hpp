// SPDX-License-Identifier: Apache-2.0
// A graph prepared once to be called many times: operators are found in LibTorch's dispatcher,
// names become slots, and each value is freed after its last use.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

using ValueStack = std::vector<c10::IValue>;
/// By the operators' full names: "aten::batch_norm". The second argument says whether the module
/// trains.
using OperatorOverrides = std::map<std::string, std::function<void(ValueStack&, bool)>>;

/// What a call depends on beside its inputs.
struct CallContext {
  /// Devices in the graph follow it, because an export records the device that it ran on.
  at::Device device;
  /// The kind of the device that the export ran on.
  at::DeviceType export_device = at::kCPU;
  bool is_training = true;  ///< the module's mode
  /// Called in place of LibTorch's operators; null: none.
  std::shared_ptr<const OperatorOverrides> overrides = {};
};

/// Takes its arguments from the stack and leaves its results.
using StackFunction = std::function<void(ValueStack&, const CallContext&)>;

bool is_number(const c10::IValue& value);
/// `value` as an argument of this type: a number where a tensor is expected becomes one that does
/// not promote dtypes, as in Python, and an integer where a float is expected becomes a float.
c10::IValue converted(const c10::IValue& value, const c10::TypePtr& type);

/// "torch.ops.aten.add.Tensor": aten::add.Tensor. Empty for a target that is no operator.
std::optional<c10::OperatorName> operator_name(const std::string& target);

/// The registered operator of a target. Empty if LibTorch has none.
std::optional<c10::OperatorHandle> find_operator(const std::string& target);

/// Whether a node of the graph, or of a graph in it, calls the operator "aten::add.Tensor".
bool has_operator(const Graph& graph, const std::string& name);

class GraphPlan {
 public:
  /// Throws DataError naming the node and its line of Python: an unknown operator, a value that no
  /// node made, an argument that the operator's schema lacks.
  explicit GraphPlan(const Graph& graph);

  /// The values of the graph's outputs. `inputs` has one value per input of the graph. LibTorch's
  /// errors get the node and its line of Python as context.
  ValueStack run(ValueStack inputs, const CallContext& context) const;
  std::size_t num_inputs() const { return input_slots_.size(); }

 private:
  friend class PlanBuilder;

  /// Where an argument's value comes from.
  struct Operand {
    enum class Kind { Constant, Slot, Setting, List };
    Kind kind = Kind::Constant;
    c10::IValue constant = {};
    std::size_t slot = 0;
    c10::IValue (*setting)(const CallContext&) = nullptr;
    std::vector<Operand> elements = {};
    c10::TypePtr type = {};  // of the argument; of a list's elements
  };
  /// Where a result goes: to one slot, to none, or a list's values to one each.
  struct Result {
    bool is_list = false;
    std::vector<std::size_t> slots = {};
  };
  struct Step {
    StackFunction function;
    std::vector<Operand> arguments;
    std::vector<Result> results;
    std::vector<std::size_t> last_uses;  // slots to free behind the step
    std::string description;
  };
  using Frame = std::vector<c10::IValue>;

  static c10::IValue value_of(const Operand& operand, const Frame& frame,
                              const CallContext& context);
  static void store(const Step& step, ValueStack& values, Frame& frame);
  void run_step(const Step& step, Frame& frame, ValueStack& stack,
                const CallContext& context) const;

  std::size_t num_slots_ = 0;
  std::vector<std::size_t> input_slots_;
  std::vector<std::size_t> unused_inputs_;
  std::vector<Step> steps_;
  std::vector<Operand> outputs_;
};

}  // namespace ddp::detail
