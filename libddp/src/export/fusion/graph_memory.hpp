// SPDX-License-Identifier: Apache-2.0
// Which values of a program share memory, which nodes write it, and which strides must stay.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

struct ValueMemory {
  std::size_t group = 0;          ///< values of one group may overlap in memory, also of two graphs
  bool is_written_later = false;  ///< by a node that runs after the one that makes the value
  /// A later node may write a reshape of the value, or of one that is computed from it. With other
  /// strides, the reshape might be a copy where the program has a view.
  bool has_fixed_strides = false;
};

struct GraphMemory {
  std::map<std::string, ValueMemory> values = {};
  std::vector<std::set<std::size_t>> written = {};  ///< by node: groups. Random state is one.

  /// Unknown names are one group, of which everything must be feared.
  ValueMemory of(const std::string& name) const;
};

/// The memory of a program's graph and of the graphs in its nodes. Each of these graphs stands in
/// one node only. `state`: inputs that share memory with no other input, as parameters and buffers.
std::map<const Graph*, GraphMemory> memory_of(const Graph& graph,
                                              const std::set<std::string>& state);

}  // namespace ddp::detail
