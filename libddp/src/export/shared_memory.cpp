// SPDX-License-Identifier: Apache-2.0
#include "export/shared_memory.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Memory = const c10::StorageImpl*;

Memory memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

bool has_same_elements(const at::Tensor& a, const at::Tensor& b) {
  return memory_of(a) == memory_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.dtype() == b.dtype() &&
         a.requires_grad() == b.requires_grad() && a.numel() > 0;
}

std::set<std::string> used_values(const Graph& graph) {
  std::set<std::string> names;
  const auto add = [&](const std::string& name) { names.insert(name); };
  for (const auto& node : graph.nodes) {
    for (const auto& input : node.inputs) {
      visit_names(input.value, add);
    }
  }
  for (const auto& output : graph.outputs) {
    visit_names(output, add);
  }
  return names;
}

}  // namespace

std::string first_view(const TensorMap& tensors) {
  std::map<Memory, const at::TensorImpl*> known;
  for (const auto& [name, tensor] : tensors) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (known.try_emplace(memory_of(tensor), impl).first->second != impl) {
      return name;
    }
  }
  return {};
}

void tie_names(const ExportedProgram& program, TensorMap& tensors) {
  struct Known {
    at::Tensor tensor;
    InputKind kind;
    bool is_used;
  };
  const auto used = used_values(program.graph);
  std::map<Memory, std::vector<Known>> known;
  std::set<std::string> inputs;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto& input = program.inputs[i];
    const auto* name = program.graph.inputs[i].name();
    if (!input.is_state() || name == nullptr) {
      continue;
    }
    inputs.insert(input.target);
    auto& tensor = tensors.at(input.target);
    const bool is_used = used.count(name->name) != 0;
    auto& others = known[memory_of(tensor)];
    const auto same = std::find_if(others.begin(), others.end(), [&](const Known& other) {
      return other.kind == input.kind && has_same_elements(other.tensor, tensor) &&
             !(other.is_used && is_used);
    });
    if (same == others.end()) {
      others.push_back({tensor, input.kind, is_used});
    } else {
      tensor = same->tensor;
      same->is_used = same->is_used || is_used;
    }
  }
  for (auto& entry : tensors) {  // a strict export lists one name of each tensor
    at::Tensor& tensor = entry.second;
    const auto& others = known[memory_of(tensor)];
    const auto same = std::find_if(others.begin(), others.end(), [&](const Known& other) {
      return has_same_elements(other.tensor, tensor);
    });
    if (inputs.count(entry.first) == 0 && same != others.end()) {
      tensor = same->tensor;
    }
  }
}

void share_tensors(const TensorMap& tensors, TensorMap& other) {
  for (auto& [name, tensor] : other) {
    const auto found = tensors.find(name);
    if (found != tensors.end() && has_same_elements(found->second, tensor)) {
      tensor = found->second;
    }
  }
}

std::map<const at::TensorImpl*, at::Tensor> copies_of(const TensorMap& tensors,
                                                      std::optional<at::Device> device,
                                                      std::optional<at::ScalarType> dtype) {
  const at::NoGradGuard no_grad;
  struct Whole {
    std::string name;  // of the first tensor
    at::ScalarType dtype;
    at::Tensor elements;
  };
  std::map<Memory, Whole> wholes;
  std::map<const at::TensorImpl*, at::Tensor> copies;
  for (const auto& [name, tensor] : tensors) {
    const auto type = tensor.scalar_type();
    auto& [first_name, first_type, whole] =
        wholes.try_emplace(memory_of(tensor), Whole{name, type, {}}).first->second;
    const bool converts = dtype && (at::isFloatingType(type) || at::isComplexType(type));
    const auto new_type = converts ? *dtype : type;
    if (!whole.defined()) {
      const auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
      const auto all = at::empty({0}, tensor.options()).set_(tensor.storage(), 0, {elements}, {1});
      whole =
          all.to(device.value_or(tensor.device()), new_type, /*non_blocking=*/false, /*copy=*/true);
    } else if (first_type != type) {
      throw SettingsError(concat("the tensors ", printable(first_name), " and ", printable(name),
                                 " of the module share memory and differ in dtype, so it can "
                                 "neither move nor be copied"));
    }
    auto& copy = copies[tensor.unsafeGetTensorImpl()];
    if (!copy.defined()) {
      copy = whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).detach();
      copy.set_requires_grad(tensor.requires_grad());
    }
  }
  return copies;
}

std::map<std::string, TensorMap> copies_by_program(const std::map<std::string, TensorMap>& programs,
                                                   const std::string& first,
                                                   std::optional<at::Device> device) {
  auto by_original = copies_of(programs.at(first), device, std::nullopt);
  std::map<std::string, TensorMap> copies;
  for (const auto& [program, tensors] : programs) {
    TensorMap others;
    for (const auto& [name, tensor] : tensors) {
      if (by_original.count(tensor.unsafeGetTensorImpl()) == 0) {
        others.emplace(name, tensor);
      }
    }
    by_original.merge(copies_of(others, device, std::nullopt));
    auto& copy = copies[program];
    for (const auto& [name, tensor] : tensors) {
      copy.emplace(name, by_original.at(tensor.unsafeGetTensorImpl()));
    }
  }
  return copies;
}

}  // namespace ddp::detail
