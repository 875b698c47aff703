// SPDX-License-Identifier: Apache-2.0
// A folder that reference.py wrote: an archive, its training inputs, and what Python's training
// gave.
#pragma once

#include <torch/torch.h>

#include <cctype>
#include <cstdlib>
#include <map>
#include <sstream>
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

/// Environment variables: CHECKPOINT_BLOCKS is a pattern, LIBRARIES a path, and any value of PLAIN
/// switches fuse off.
inline ddp::ExportedModuleOptions chosen_options() {
  const char* pattern = std::getenv("CHECKPOINT_BLOCKS");
  ddp::ExportedModuleOptions options;
  if (pattern != nullptr) {
    options.checkpoint_blocks = {pattern};
  }
  options.fuse = std::getenv("PLAIN") == nullptr;
  if (const char* library = std::getenv("LIBRARIES")) {
    options.libraries = {library};
  }
  return options;
}

struct TrainingCase {
  /// A positional argument, or a tensor in one.
  struct Input {
    std::string position;
    std::string key;  // of a dict, the field of a named tuple, or the index in a list
    at::Tensor tensor;
  };

  explicit TrainingCase(const std::string& folder)
      : module(folder + "/model.pt2", chosen_options()),
        tensors(ddp::load_safetensors(folder + "/case.safetensors").tensors) {
    at::globalContext().setDeterministicCuDNN(true);
    module->to(chosen_device());
    batches = tensors.at("batches").item<int64_t>();
    learning_rate = tensors.at("lr").item<double>();
    for (const auto& [name, tensor] : tensors) {
      if (name.starts_with("input.")) {  // names are in order
        const auto dot = name.find('.', 6);
        inputs.push_back({name.substr(6, dot - 6),
                          dot == std::string::npos ? "" : name.substr(dot + 1), on_device(tensor)});
      } else if (name.starts_with("keyword.")) {
        keywords.emplace(name.substr(8), on_device(tensor));
      }
    }
  }

  /// The inputs of step `step`, a part of all: the positional ones, then those by name.
  std::vector<at::Tensor> batch(int64_t step) const {
    std::vector<at::Tensor> parts;
    for (const auto& input : inputs) {
      parts.push_back(part(input.tensor, step));
    }
    for (const auto& [name, value] : keywords) {
      parts.push_back(part(value.toTensor(), step));
    }
    return parts;
  }
  /// The outputs of `model`, the module or its wrapper, for a batch().
  template <typename Model>
  c10::IValue call(Model& model, const std::vector<at::Tensor>& parts) const {
    const auto first_named = parts.begin() + static_cast<std::ptrdiff_t>(inputs.size());
    std::map<std::string, c10::IValue> named;
    auto next = first_named;
    for (const auto& [name, value] : keywords) {
      named.emplace(name, *next++);
    }
    return model.forward(positional({parts.begin(), first_named}), named);
  }
  /// For example "losses: 2.31 to 1.05, at most 1e-7 from Python's".
  std::string compare_losses(const std::vector<at::Tensor>& losses) const {
    const auto ours = at::stack(losses).cpu(), theirs = tensors.at("losses");
    std::ostringstream text;
    text << "losses " << ours[0].item<double>() << " to " << ours[-1].item<double>() << ", at most "
         << ((ours - theirs).abs() / theirs.abs()).max().item<double>()
         << " from Python's (relative)";
    return text.str();
  }

  int64_t batches = 1;
  double learning_rate = 0;
  ddp::ExportedModule module;
  ddp::TensorMap tensors;
  std::vector<Input> inputs;
  std::map<std::string, c10::IValue> keywords;

 private:
  at::Tensor part(const at::Tensor& value, int64_t step) const {
    return value.chunk(batches).at(static_cast<std::size_t>(step % batches));
  }
  // `parts` are the tensors of `inputs`; those of one argument are put together.
  std::vector<c10::IValue> positional(const std::vector<at::Tensor>& parts) const {
    std::vector<c10::IValue> arguments;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto& [position, key, whole] = inputs[i];
      const bool is_first = i == 0 || inputs[i - 1].position != position;
      if (key.empty()) {
        arguments.emplace_back(parts[i]);
      } else if (std::isdigit(static_cast<unsigned char>(key[0])) != 0) {
        if (is_first) {
          arguments.emplace_back(c10::impl::GenericList(c10::AnyType::get()));
        }
        arguments.back().toList().push_back(parts[i]);
      } else {
        if (is_first) {
          arguments.emplace_back(
              c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get()));
        }
        arguments.back().toGenericDict().insert(key, parts[i]);
      }
    }
    return arguments;
  }
  // A copy has the alignment that Python's tensors have, and so the bits.
  static at::Tensor on_device(const at::Tensor& tensor) {
    return tensor.clone().to(chosen_device());
  }
};

}  // namespace export_test
