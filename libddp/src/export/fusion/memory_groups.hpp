// SPDX-License-Identifier: Apache-2.0
// Which values of a graph may share memory.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

/// Values whose memory may overlap are in one group: views, results that operators may return
/// unchanged, and all results and operands of a node that is no operator of LibTorch.
class MemoryGroups {
 public:
  /// Inputs named in `separate` share memory with no other input. All others may with each other.
  MemoryGroups(const Graph& graph, const std::set<std::string>& separate);

  std::size_t of(const std::string& name) const;  ///< unknown names are one group
  std::set<std::size_t> of(const std::set<std::string>& names) const;

 private:
  std::size_t index_of(const std::string& name);
  std::size_t root_of(std::size_t index);
  void join(const std::string& a, const std::string& b);
  void join_results(const Node& node);

  std::map<std::string, std::size_t> indices_;
  std::vector<std::size_t> parents_ = {0};  // of unknown names
};

}  // namespace ddp::detail
