// SPDX-License-Identifier: Apache-2.0
// Values of a graph that share memory with a buffer.
#pragma once

#include <ATen/core/function_schema.h>

#include <map>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

/// Python's names of buffers, by the values of a graph that are these buffers or may share their
/// memory.
using BufferNames = std::map<std::string, std::string>;

/// Whether the operator may return its argument or a view of it, which its schema does not say.
bool is_unmarked_view(const c10::FunctionSchema& schema);

/// The arguments that the node's operator writes, as its schema says. (Batch norms also write their
/// running estimates.)
std::vector<const Argument*> written_arguments(const Node& node);

/// Arguments of an operator and results that may use their memory.
struct SharedMemory {
  std::vector<const Argument*> operands, results;
};
SharedMemory shared_memory(const Node& node, const c10::FunctionSchema& schema);

/// The name of a buffer that the node's operator writes. Empty if it writes none.
std::string written_buffer(const Node& node, const BufferNames& buffers);

/// Adds the results of the node's operator that may share a buffer's memory.
void add_aliases(const Node& node, BufferNames& buffers);

/// Adds the results of a higher-order node whose graph `inner` returns values that may share a
/// buffer's memory. `inside` are the names in this graph.
void add_aliases_of_graph(const Node& node, const Graph& inner, const BufferNames& inside,
                          BufferNames& buffers);

}  // namespace ddp::detail
