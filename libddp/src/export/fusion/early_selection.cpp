// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/early_selection.hpp"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/value_uses.hpp"

namespace ddp::detail {
namespace {

// One row of `x`, whose dimension stays, and the number of rows that the whole values have. `rows`
// is that of the values before. A size of 1 serves all rows.
std::tuple<at::Tensor, int64_t> narrow_to_row(const at::Tensor& x, int64_t dim, int64_t index,
                                              int64_t rows) {
  const auto size = x.size(dim);
  TORCH_CHECK(size == rows || size == 1 || rows == 1, "a value has ", size, " rows in dimension ",
              dim, ", and another one ", rows);
  return {x.is_cuda() && size > 1 ? x.narrow(dim, index, 1) : x, size == 1 ? rows : size};
}

at::Tensor select_row(const at::Tensor& x, int64_t dim, int64_t index, int64_t rows) {
  TORCH_CHECK_INDEX(-rows <= index && index < rows, "row ", index, " of dimension ", dim,
                    " is selected, which has ", rows);
  return x.select(dim, x.size(dim) == 1 ? 0 : index);
}

// Dimension `dim` of tensors with `rank` dimensions, of which it is not the last.
struct Rows {
  int64_t dim = 0;
  int64_t rank = 0;
};

// x[:], as torch.export writes the first index of x[:, 0].
bool is_whole_slice(const Node& node) {
  const auto slice = slice_of(node);
  return slice && slice->start == 0 && slice->end == Slice::kEnd && slice->step == 1;
}

// The arguments of which the operator reads only one row for a row of its result. Empty: it may
// read others.
std::vector<const char*> row_arguments(const Node& node, const Rows& rows) {
  constexpr std::array<std::string_view, 6> kOfElements = {"gelu.default",    "relu.default",
                                                           "silu.default",    "tanh.default",
                                                           "sigmoid.default", "to.dtype"};
  constexpr std::array<std::string_view, 3> kOfTwo = {"add.Tensor", "sub.Tensor", "mul.Tensor"};
  const auto is_one_of = [&](const auto& overloads) {
    return std::any_of(overloads.begin(), overloads.end(),
                       [&](std::string_view overload) { return is_call_of(node, overload); });
  };
  if (is_call_of(node, "linear.default") || is_call_of(node, "dropout.default")) {
    return {"input"};
  }
  if (is_whole_slice(node)) {
    return {"self"};
  }
  if (is_call_of(node, "layer_norm.default")) {
    const auto* shape = node.input("normalized_shape");
    const auto* sizes = shape ? shape->list() : nullptr;
    const bool is_within_row =
        sizes != nullptr && static_cast<int64_t>(sizes->size()) < rows.rank - rows.dim;
    return is_within_row ? std::vector<const char*>{"input"} : std::vector<const char*>{};
  }
  return is_one_of(kOfElements) ? std::vector<const char*>{"self"}
         : is_one_of(kOfTwo)    ? std::vector<const char*>{"self", "other"}
                                : std::vector<const char*>{};
}

class Selector {
 public:
  Selector(Graph& graph, const GraphMemory& memory)
      : graph_(graph), memory_(memory), uses_(uses_of(graph)) {}

  /// Moves the selection that node i is towards the graph's inputs. Returns whether it could.
  bool move(std::size_t i) {
    const auto rows = selected_rows(graph_.nodes[i]);
    auto members = rows ? members_before(i, *rows) : std::set<std::size_t>();
    const bool saves = std::any_of(members.begin(), members.end(), [&](std::size_t member) {
      return is_call_of(graph_.nodes[member], "linear.default");
    });
    if (!saves || !may_narrow(members, *rows)) {
      return false;
    }
    rows_.clear();
    num_rows_ = {c10::IValue(1)};
    result_ = graph_.nodes[i].outputs[0].name()->name;
    for (const auto member : members) {
      narrow_arguments(member, members, *rows, *graph_.nodes[i].input("index"));
    }
    graph_.nodes[i].target = "torch.ops.libddp.select_row.default";
    graph_.nodes[i].inputs.push_back({"rows", num_rows_});
    return true;
  }

  void finish() {
    std::vector<Node> nodes;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      for (auto& node : narrows_[i]) {
        nodes.push_back(std::move(node));
      }
      nodes.push_back(std::move(graph_.nodes[i]));
    }
    graph_.nodes = std::move(nodes);
  }

 private:
  // -1: the archive does not say it, or the value is no tensor.
  int64_t rank_of(const Argument* value) const {
    const auto found =
        is_value(value) ? graph_.ranks.find(value->name()->name) : graph_.ranks.end();
    return found == graph_.ranks.end() ? -1 : found->second;
  }

  std::optional<Rows> selected_rows(const Node& node) const {
    const auto rank = rank_of(node.input("self"));
    auto dim = integer_of(node.input("dim"), kNoInteger);
    dim += dim < 0 && dim != kNoInteger ? rank : 0;
    const bool is_known = is_call_of(node, "select.int") && node.outputs.size() == 1 &&
                          integer_of(node.input("index"), kNoInteger) != kNoInteger;
    return is_known && dim >= 0 && dim < rank - 1 && !has_fixed_strides(node.outputs[0])
               ? std::optional(Rows{dim, rank})
               : std::nullopt;
  }

  // A later reshape would be a view of a row that is computed alone, and is a copy of one of many.
  bool has_fixed_strides(const Argument& value) const {
    return !is_value(&value) || memory_.of(value.name()->name).has_fixed_strides;
  }

  // The nodes before the selection i, and itself, whose results only they read. A node is looked at
  // after all its readers.
  std::set<std::size_t> members_before(std::size_t i, const Rows& rows) const {
    std::set<std::size_t> members = {i};
    std::set<std::size_t, std::greater<>> candidates;
    const auto add_sources = [&](const std::vector<const Argument*>& values) {
      for (const auto* value : values) {
        if (const auto source = uses_.at(value->name()->name).source) {
          candidates.insert(*source);
        }
      }
    };
    add_sources({graph_.nodes[i].input("self")});
    while (!candidates.empty()) {
      const auto candidate = *candidates.begin();
      candidates.erase(candidates.begin());
      const auto values = row_values(candidate, rows);
      if (!values.empty() && is_read_only_by(candidate, members, rows)) {
        members.insert(candidate);
        add_sources(values);
      }
    }
    return members;
  }

  // The operands of which the node needs one row. Empty: it may need more.
  std::vector<const Argument*> row_values(std::size_t i, const Rows& rows) const {
    const auto& node = graph_.nodes[i];
    const auto* bias = node.input("bias");
    if (is_call_of(node, "linear.default") && !is_none(bias) && rank_of(bias) != 1) {
      return {};  // PyTorch also adds matrices
    }
    std::vector<const Argument*> values;
    for (const char* name : row_arguments(node, rows)) {
      const auto* value = node.input(name);
      if (value == nullptr || (!value->name() && !value->constant())) {
        return {};
      }
      const auto rank = rank_of(value);
      if (rank == rows.rank) {
        values.push_back(value);
      } else if (value->name() && (rank < 0 || rank >= rows.rank - rows.dim)) {
        return {};  // unknown, or one with other rows
      }
    }
    const bool fits = node.outputs.size() == 1 && rank_of(&node.outputs[0]) == rows.rank;
    return fits ? values : std::vector<const Argument*>();
  }

  bool is_read_only_by(std::size_t i, const std::set<std::size_t>& members,
                       const Rows& rows) const {
    const auto& name = graph_.nodes[i].outputs[0].name()->name;
    const auto selection = *members.rbegin();
    const auto& uses = uses_.at(name);
    return !uses.is_result &&
           std::all_of(uses.readers.begin(), uses.readers.end(), [&](std::size_t reader) {
             return reader == selection ||
                    (members.contains(reader) && reads_only_rows(graph_.nodes[reader], name, rows));
           });
  }

  // A linear layer may read the value also as its weight.
  static bool reads_only_rows(const Node& node, const std::string& name, const Rows& rows) {
    return std::all_of(node.inputs.begin(), node.inputs.end(), [&](const NamedArgument& input) {
      return !is_named(input.value, name) || is_row_argument(node, input.name, rows);
    });
  }

  static bool is_named(const Argument& value, const std::string& name) {
    return value.name() && value.name()->name == name;
  }

  static bool is_row_argument(const Node& node, const std::string& argument, const Rows& rows) {
    const auto arguments = row_arguments(node, rows);
    return std::find(arguments.begin(), arguments.end(), argument) != arguments.end();
  }

  std::vector<const Argument*> values_to_narrow(std::size_t member,
                                                const std::set<std::size_t>& members,
                                                const Rows& rows) const {
    auto values = row_values(member, rows);
    std::erase_if(values, [&](const Argument* value) {
      const auto source = uses_.at(value->name()->name).source;
      return source && members.contains(*source);
    });
    return values;
  }

  // The operator's schema does not say that it returns a view.
  bool may_narrow(const std::set<std::size_t>& members, const Rows& rows) const {
    return std::all_of(members.begin(), members.end(), [&](std::size_t member) {
      const auto values = values_to_narrow(member, members, rows);
      return std::none_of(values.begin(), values.end(), [&](const Argument* value) {
        return memory_.of(value->name()->name).is_written_later;
      });
    });
  }

  void narrow_arguments(std::size_t member, const std::set<std::size_t>& members, const Rows& rows,
                        const Argument& index) {
    std::set<std::string> names;
    for (const auto* value : values_to_narrow(member, members, rows)) {
      names.insert(value->name()->name);
    }
    for (const auto& whole : names) {
      for (auto& input : graph_.nodes[member].inputs) {
        if (is_named(input.value, whole) &&
            is_row_argument(graph_.nodes[member], input.name, rows)) {
          input.value.value = ValueName{row_of(whole, member, rows, index)};
        }
      }
    }
  }

  // The name of the value's row, which is made before its first reader.
  std::string row_of(const std::string& whole, std::size_t member, const Rows& rows,
                     const Argument& index) {
    if (const auto found = rows_.find(whole); found != rows_.end()) {
      return found->second;
    }
    const auto name = new_name(whole + ".row." + result_);
    const Argument num_rows = {ValueName{new_name(whole + ".rows." + result_)}};
    const auto& reader = graph_.nodes[member];
    narrows_[member].push_back({.name = name,
                                .target = kNarrowToRow,
                                .inputs = {{"x", {ValueName{whole}}},
                                           {"dim", {c10::IValue(rows.dim)}},
                                           {"index", index},
                                           {"rows", num_rows_}},
                                .outputs = {{ValueName{name}}, num_rows},
                                .python_line = reader.python_line,
                                .module = reader.module});
    num_rows_ = num_rows;
    return rows_[whole] = name;
  }

  std::string new_name(std::string name) {
    while (uses_.contains(name)) {
      name += '.';
    }
    uses_[name];
    return name;
  }

  Graph& graph_;
  const GraphMemory& memory_;
  std::map<std::string, ValueUses> uses_;
  std::map<std::size_t, std::vector<Node>> narrows_;  // by the node that they stand before
  // Of one selection:
  std::map<std::string, std::string> rows_;  // by the whole value
  Argument num_rows_;                        // that the values have so far
  std::string result_;                       // makes names of its own: many rows of one value
};

TORCH_LIBRARY_FRAGMENT(libddp, library) {
  library.def("narrow_to_row(Tensor x, int dim, int index, int rows) -> (Tensor, int)",
              narrow_to_row);
  library.def("select_row(Tensor(a) self, int dim, int index, int rows) -> Tensor(a)", select_row);
}

}  // namespace

int select_rows_early(Graph& graph, const GraphMemory& memory) {
  Selector selector(graph, memory);
  int moved = 0;
  for (auto i = graph.nodes.size(); i-- > 0;) {
    moved += selector.move(i) ? 1 : 0;
  }
  selector.finish();
  return moved;
}

}  // namespace ddp::detail
