// SPDX-License-Identifier: Apache-2.0
#include "train/graph/graph_fills.hpp"

#include <vector>

#include "comm/cuda_check.hpp"

namespace ddp::detail {
namespace {

constexpr size_t kSmallBytes = 8192;

// CUDA 13's queries also return the edges' data.
#if CUDART_VERSION >= 13000
cudaError_t get_dependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, size_t* count) {
  return cudaGraphNodeGetDependencies(node, nodes, nullptr, count);
}
cudaError_t get_dependents(cudaGraphNode_t node, cudaGraphNode_t* nodes, size_t* count) {
  return cudaGraphNodeGetDependentNodes(node, nodes, nullptr, count);
}
cudaError_t add_dependencies(cudaGraph_t graph, const cudaGraphNode_t* from,
                             const cudaGraphNode_t* to, size_t count) {
  return cudaGraphAddDependencies(graph, from, to, nullptr, count);
}
#else
cudaError_t get_dependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, size_t* count) {
  return cudaGraphNodeGetDependencies(node, nodes, count);
}
cudaError_t get_dependents(cudaGraphNode_t node, cudaGraphNode_t* nodes, size_t* count) {
  return cudaGraphNodeGetDependentNodes(node, nodes, count);
}
cudaError_t add_dependencies(cudaGraph_t graph, const cudaGraphNode_t* from,
                             const cudaGraphNode_t* to, size_t count) {
  return cudaGraphAddDependencies(graph, from, to, count);
}
#endif

template <typename Query>
std::vector<cudaGraphNode_t> neighbours(const Query& query, cudaGraphNode_t node,
                                        const char* name) {
  size_t count = 0;
  check_cuda(query(node, nullptr, &count), name);
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) {
    check_cuda(query(node, nodes.data(), &count), name);
  }
  return nodes;
}

bool is_small_memset(cudaGraphNode_t node, cudaMemsetParams& memset) {
  cudaGraphNodeType type{};
  check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
  if (type != cudaGraphNodeTypeMemset) {
    return false;
  }
  check_cuda(cudaGraphMemsetNodeGetParams(node, &memset), "cudaGraphMemsetNodeGetParams");
  return memset.height <= 1 && memset.width > 0 && memset.width * memset.elementSize < kSmallBytes;
}

void replace(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams& memset) {
  const auto before = neighbours(get_dependencies, node, "cudaGraphNodeGetDependencies");
  const auto behind = neighbours(get_dependents, node, "cudaGraphNodeGetDependentNodes");
  cudaGraphNode_t kernel = nullptr;
  check_cuda(add_fill(graph, before.data(), before.size(), memset, &kernel),
             "cudaGraphAddKernelNode");
  if (!behind.empty()) {
    const std::vector<cudaGraphNode_t> from(behind.size(), kernel);
    check_cuda(add_dependencies(graph, from.data(), behind.data(), behind.size()),
               "cudaGraphAddDependencies");
  }
  check_cuda(cudaGraphDestroyNode(node), "cudaGraphDestroyNode");
}

}  // namespace

int64_t replace_small_memsets(cudaGraph_t graph) {
  size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  int64_t replaced = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaMemsetParams memset{};
    if (is_small_memset(node, memset)) {
      replace(graph, node, memset);
      ++replaced;
    }
  }
  return replaced;
}

}  // namespace ddp::detail
