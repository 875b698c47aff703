// SPDX-License-Identifier: Apache-2.0
#include "export/fixed_dtype.hpp"

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

const Node* node_with_dtype(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    for (const auto& input : node.inputs) {
      const auto* inner = input.value.graph();
      const auto* dtype = input.value.dtype();
      if (dtype != nullptr && !c10::isIntegralType(*dtype, /*includeBool=*/true)) {
        return &node;
      }
      if (const auto* found = inner ? node_with_dtype(**inner) : nullptr) {
        return found;
      }
    }
  }
  return nullptr;
}

}  // namespace

std::string fixed_dtype(const ExportedProgram& program, const TensorMap& constants,
                        at::ScalarType dtype) {
  if (const auto* node = node_with_dtype(program.graph)) {
    return node->describe() + " names a dtype";
  }
  for (const auto& input : program.inputs) {
    if (input.kind != InputKind::TensorConstant) {
      continue;
    }
    const auto& tensor = constants.at(input.target);
    if (tensor.is_floating_point() && tensor.dim() > 0 && tensor.scalar_type() != dtype) {
      return concat("constant ", printable(input.target), " is ", tensor.scalar_type());
    }
  }
  return "";
}

}  // namespace ddp::detail
