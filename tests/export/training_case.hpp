// SPDX-License-Identifier: Apache-2.0
// A folder that reference.py wrote: an archive, its training inputs, and what Python's training
// gave.
#pragma once

#include <torch/torch.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"
#include "ddp/export/exported_module.hpp"

namespace export_test {

inline void append_leaves(const c10::IValue& value, std::vector<at::Tensor>& leaves) {
  if (value.isTensor()) {
    leaves.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      append_leaves(element, leaves);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      append_leaves(element, leaves);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      append_leaves(entry.value(), leaves);
    }
  }
}

// The sum of the mean squares of all outputs that have a gradient.
inline at::Tensor loss_of(const std::vector<at::Tensor>& leaves) {
  at::Tensor loss;
  for (const auto& leaf : leaves) {
    if (leaf.requires_grad()) {
      const auto part = leaf.dim() == 0 ? leaf : leaf.square().mean();
      loss = loss.defined() ? loss + part : part;
    }
  }
  return loss;
}

/// The environment variable DEVICE, for Python too; the CPU without it.
inline at::Device chosen_device() {
  const char* name = std::getenv("DEVICE");
  return at::Device(name == nullptr ? "cpu" : name);
}

struct TrainingCase {
  explicit TrainingCase(const std::string& folder)
      : module(folder + "/model.pt2"),
        tensors(ddp::load_safetensors(folder + "/case.safetensors").tensors) {
    module->to(chosen_device());
    for (const auto& [name, tensor] : tensors) {
      if (name.starts_with("input.")) {
        inputs.emplace_back(on_device(tensor));  // names are in order
      } else if (name.starts_with("keyword.")) {
        keywords.emplace(name.substr(8), on_device(tensor));
      }
    }
  }

  ddp::ExportedModule module;
  ddp::TensorMap tensors;
  std::vector<c10::IValue> inputs;
  std::map<std::string, c10::IValue> keywords;

 private:
  // A copy has the alignment that Python's tensors have, and so the bits.
  static at::Tensor on_device(const at::Tensor& tensor) {
    return tensor.clone().to(chosen_device());
  }
};

}  // namespace export_test
