// SPDX-License-Identifier: Apache-2.0
// Which parameters a backward will not reach, here and on the other ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "reduce/reducer_impl.hpp"

namespace ddp {

// Walks the graph back from the outputs.
std::vector<bool> Reducer::Impl::find_reachable(const std::vector<at::Tensor>& outputs) const {
  std::vector<bool> found_here(parameters.size(), false);
  std::vector<torch::autograd::Node*> stack;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      stack.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!stack.empty()) {
    auto* node = stack.back();
    stack.pop_back();
    const auto found = accumulator_index.find(node);
    if (found != accumulator_index.end()) {
      found_here[static_cast<size_t>(found->second)] = true;
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return found_here;
}

// A static graph needs the map once.
bool Reducer::Impl::reads_used_map() const {
  return options.static_graph ? num_passes == 0 : options.find_unused_parameters;
}

// In the sequence of the last bucket, so that its place among the collectives is agreed too.
void Reducer::Impl::launch_used_map() {
  if (!reads_used_map()) {
    return;
  }
  std::vector<int> used;
  for (const auto& parameter : parameters) {
    used.push_back(parameter.used ? 1 : 0);
  }
  used_map.copy_(at::tensor(used, at::kInt));
  used_work = communicator->all_reduce(used_map, ReduceOp::Sum);
}

// Per parameter: whether any rank used it since the last synchronised backward. Empty: all count.
std::vector<bool> Reducer::Impl::globally_used() {
  if (!reads_used_map()) {
    return static_used;
  }
  used_work->wait();
  used_work = nullptr;
  std::vector<bool> used;
  bool all_used_here = true;
  for (const auto& parameter : parameters) {
    used.push_back(parameter.used);
    all_used_here = all_used_here && parameter.used;
  }
  if (!all_used_here) {  // the only host read, and only where something is unused here
    const auto counts = used_map.cpu();
    for (size_t i = 0; i < used.size(); ++i) {
      used[i] = counts.data_ptr<int>()[i] > 0;
    }
  }
  if (options.static_graph) {
    static_used = used;
  }
  return used;
}

}  // namespace ddp
