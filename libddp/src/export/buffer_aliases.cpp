// SPDX-License-Identifier: Apache-2.0
#include "export/buffer_aliases.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "export/graph_operands.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

// Operators that may return their argument itself or a view of it, which their schema does not say.
constexpr std::string_view kUnmarkedViews[] = {
    "aten::_cast_Byte",
    "aten::_cast_Char",
    "aten::_cast_Double",
    "aten::_cast_Float",
    "aten::_cast_Half",
    "aten::_cast_Int",
    "aten::_cast_Long",
    "aten::_cast_Short",
    "aten::_reshape_from_tensor",
    "aten::_to_cpu",
    "aten::_unsafe_view",
    "aten::align_as",
    "aten::align_tensors",
    "aten::alpha_dropout",
    "aten::atleast_1d",
    "aten::atleast_2d",
    "aten::atleast_3d",
    "aten::broadcast_tensors",
    "aten::cartesian_prod",
    "aten::chain_matmul",
    "aten::conj_physical",
    "aten::data",
    "aten::dropout",
    "aten::einsum",
    "aten::feature_alpha_dropout",
    "aten::feature_dropout",
    "aten::flatten_dense_tensors",
    "aten::lift",
    "aten::meshgrid",
    "aten::sum_to_size",
    "aten::to_dense",
    "aten::type_as",
    "aten::unflatten_dense_tensors",
    "aten::unsafe_chunk",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
};

// Empty if no value of the argument is a buffer.
std::string buffer_in(const Argument& argument, const BufferNames& buffers) {
  std::string buffer;
  visit_names(argument, [&](const std::string& name) {
    const auto found = buffers.find(name);
    buffer = found != buffers.end() && buffer.empty() ? found->second : buffer;
  });
  return buffer;
}

}  // namespace

bool is_unmarked_view(const c10::FunctionSchema& schema) {
  return std::find(std::begin(kUnmarkedViews), std::end(kUnmarkedViews), schema.name()) !=
         std::end(kUnmarkedViews);
}

std::vector<const Argument*> written_arguments(const Node& node) {
  std::vector<const Argument*> written;
  const auto handle = find_operator(node.target);
  for (const auto& input : node.inputs) {
    const auto index = handle ? handle->schema().argumentIndexWithName(input.name) : std::nullopt;
    const auto* alias =
        index ? handle->schema().arguments()[static_cast<std::size_t>(*index)].alias_info()
              : nullptr;
    if (alias != nullptr && alias->isWrite()) {
      written.push_back(&input.value);
    }
  }
  return written;
}

SharedMemory shared_memory(const Node& node, const c10::FunctionSchema& schema) {
  SharedMemory shared;
  const bool is_unmarked = is_unmarked_view(schema);
  for (const auto& argument : schema.arguments()) {
    const auto* given = node.input(argument.name());
    if (given != nullptr && (argument.alias_info() != nullptr || is_unmarked)) {
      shared.operands.push_back(given);
    }
  }
  for (std::size_t i = 0; i < std::min(node.outputs.size(), schema.returns().size()); ++i) {
    if (is_unmarked || schema.returns()[i].alias_info() != nullptr) {
      shared.results.push_back(&node.outputs[i]);
    }
  }
  return shared;
}

std::string written_buffer(const Node& node, const BufferNames& buffers) {
  for (const auto* written : written_arguments(node)) {
    if (auto buffer = buffer_in(*written, buffers); !buffer.empty()) {
      return buffer;
    }
  }
  return "";
}

void add_aliases(const Node& node, BufferNames& buffers) {
  const auto handle = find_operator(node.target);
  const auto shared = handle ? shared_memory(node, handle->schema()) : SharedMemory();
  for (const auto* operand : shared.operands) {
    const auto buffer = buffer_in(*operand, buffers);
    for (const auto* result : buffer.empty() ? std::vector<const Argument*>() : shared.results) {
      visit_names(*result, [&](const std::string& name) { buffers.emplace(name, buffer); });
    }
  }
}

void add_aliases_of_graph(const Node& node, const Graph& inner, const BufferNames& inside,
                          BufferNames& buffers) {
  const auto from = flat_names(inner.outputs), to = flat_names(node.outputs);
  for (std::size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
    const auto found = from[i] ? inside.find(from[i]->name) : inside.end();
    if (found != inside.end() && to[i] != nullptr) {
      buffers.emplace(to[i]->name, found->second);
    }
  }
}

}  // namespace ddp::detail
