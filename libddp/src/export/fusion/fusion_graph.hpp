// SPDX-License-Identifier: Apache-2.0
// A graph while patterns of its nodes are replaced.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "export/fusion/graph_memory.hpp"
#include "export/fusion/value_uses.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// What replaces the nodes of a match. It runs where the last of them stood.
struct FusedCall {
  const char* name;        ///< of the op, for messages: "batch_norm_relu"
  FusedFunction function;  ///< takes `inputs` from the stack in their order
  std::vector<NamedArgument> inputs = {};
  /// The function has a second result: the same values for a second reader, whose gradient is then
  /// added in the op's backward. Used if the last node's result has two readers.
  bool forks = false;
  /// Or its second result equals this value, which a matched node makes or reads. Other readers
  /// take that result.
  std::string passes_on = {};
  /// The result may have other strides than the last node's.
  bool changes_strides = false;
};

/// Finds out which nodes may be replaced, and replaces them. Callers go from the last node to the
/// first: a node before the current one is never replaced yet.
class FusionGraph {
 public:
  /// `memory` is that of the unchanged graph, and must outlive this.
  FusionGraph(Graph& graph, const GraphMemory& memory);

  std::size_t size() const { return graph_.nodes.size(); }
  const Node& at(std::size_t i) const { return graph_.nodes[i]; }
  bool is_removed(std::size_t i) const { return removed_[i]; }

  /// The node whose only result is this value, whoever reads it. Empty for nullptr.
  std::optional<std::size_t> source(const Argument* value) const;
  /// The same if the value has one reader and is no result of the graph: the node may disappear.
  std::optional<std::size_t> private_source(const Argument* value) const;
  /// The private source, if it calls this overload: "rsqrt.default".
  std::optional<std::size_t> private_call(const Argument* value, std::string_view overload) const;
  /// Whether only these nodes read the value, and it is no result of the graph.
  bool is_read_only_by(const Argument* value, const std::vector<std::size_t>& nodes) const;

  /// The nodes that read the value, one entry for each mention, ascending. Empty if the graph
  /// returns it.
  std::vector<std::size_t> all_readers(const Argument* value) const;

  /// Whether the value is a size or another number, or unknown.
  bool is_number(const Argument& value) const;
  /// Whether neither node writes what the other reads or writes.
  bool are_independent(std::size_t a, std::size_t b) const;
  /// Whether a node behind the one that makes the value may write its memory.
  bool is_written_later(const std::string& value) const;
  /// Whether the value may share memory with an input or a result of the graph.
  bool is_shared_outside(const std::string& value) const;

  /// Replaces the nodes `matched` by the call. They must be ascending; the last one gives the
  /// result its name. Returns false and does nothing if that would move one of them across a node
  /// that writes what it reads or reads what it writes.
  bool replace(const std::vector<std::size_t>& matched, FusedCall call);

  /// Removes the nodes that replace() left over. Returns the number of replacements by op.
  std::map<std::string, int> finish();

 private:
  bool may_move(const std::vector<std::size_t>& matched) const;
  /// The tensors that the node reads, by the name that their gradient has.
  std::set<std::string> tensors_read(std::size_t i) const;
  void fork_result(std::size_t last);
  std::optional<std::set<std::size_t>> other_readers(const std::string& value,
                                                     const std::vector<std::size_t>& matched) const;
  void add_result(std::size_t last, const std::string& value, std::string twin,
                  const std::set<std::size_t>& readers);
  bool reads_plainly(std::size_t reader, const std::string& name) const;

  Graph& graph_;
  const GraphMemory& memory_;
  std::map<std::string, ValueUses> values_;
  std::set<std::size_t> outside_;  // memory of the graph's inputs and results, in groups
  std::vector<bool> removed_;
  std::map<std::string, int> counts_;
};

}  // namespace ddp::detail
