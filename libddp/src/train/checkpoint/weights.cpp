// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/weights.hpp"

#include <torch/nn/module.h>

#include <set>

#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"

namespace ddp {
namespace {

constexpr std::size_t kShownNames = 10;

std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShownNames; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() > kShownNames ? text + ", …" : text;
}

void append_list(std::string& text, const char* what, const std::vector<std::string>& names) {
  if (names.empty()) {
    return;
  }
  text += concat(text.empty() ? "" : "; ", names.size(), ' ', what, ": ", join_names(names));
}

// Replaces the weights whose names begin with `prefix`.
void replace_state(TensorMap& weights, const std::string& prefix, const TensorMap& state) {
  std::erase_if(weights, [&](const auto& entry) { return entry.first.starts_with(prefix); });
  for (const auto& [name, tensor] : state) {
    weights.emplace(prefix + name, tensor);
  }
}

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// A checkpoint holds a tied weight once, under one of its names.
TensorMap with_tied_names(const TensorMap& weights, TensorMap tensors) {
  for (const auto& [name, weight] : weights) {
    if (tensors.count(name) != 0) {
      continue;
    }
    for (const auto& [other, twin] : weights) {
      if (const auto found = tensors.find(other);
          found != tensors.end() && is_same_memory(weight, twin)) {
        tensors[name] = found->second;
        break;
      }
    }
  }
  return tensors;
}

}  // namespace

std::string WeightDifferences::to_string() const {
  std::string text;
  append_list(text, "missing", missing);
  append_list(text, "unexpected", unexpected);
  append_list(text, "of another shape", wrong_shapes);
  return text;
}

WeightDifferences compare_weights(const TensorMap& module, const TensorMap& file) {
  WeightDifferences differences;
  for (const auto& [name, tensor] : module) {
    const auto found = file.find(name);
    if (found == file.end()) {
      differences.missing.push_back(name);
    } else if (found->second.sizes() != tensor.sizes()) {
      differences.wrong_shapes.push_back(concat(name, ": ", tensor.sizes(), " in the module, ",
                                                found->second.sizes(), " in the file"));
    }
  }
  for (const auto& [name, tensor] : file) {
    if (module.count(name) == 0) {
      differences.unexpected.push_back(name);
    }
  }
  return differences;
}

TensorMap named_weights(const torch::nn::Module& module) {
  TensorMap weights;
  for (const auto& item : module.named_parameters()) {
    weights.emplace(item.key(), item.value().detach());
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      weights.emplace(item.key(), item.value().detach());
    }
  }
  // Such a module knows which of its tensors Python's state_dict() has, and under which names.
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    if (const auto* exported = child.value()->as<ExportedModuleImpl>()) {
      replace_state(weights, child.key() + ".", exported->state_dict());
    }
  }
  if (const auto* exported = module.as<ExportedModuleImpl>()) {
    replace_state(weights, "", exported->state_dict());
  }
  return weights;
}

void save_weights(const torch::nn::Module& module, const std::string& path) {
  save_safetensors(path, named_weights(module), {{"format", "pt"}});
}

WeightDifferences load_weights(torch::nn::Module& module, const std::string& path, bool strict) {
  return load_weights(module, load_safetensors(path).tensors, path, strict);
}

WeightDifferences load_weights(torch::nn::Module& module, const std::string& path,
                               const char* prefix, bool strict) {
  return load_weights(module, path, std::string(prefix), strict);  // else it would become a bool
}

WeightDifferences load_weights(torch::nn::Module& module, const std::string& path,
                               const std::string& prefix, bool strict) {
  const auto beginning = concat(prefix, '.');
  TensorMap tensors;
  std::set<std::string> prefixes;
  for (const auto& [key, tensor] : load_safetensors(path).tensors) {
    if (key.starts_with(beginning)) {
      tensors.emplace(key.substr(beginning.size()), tensor);
    } else if (const auto dot = key.find('.'); dot != std::string::npos) {
      prefixes.insert(key.substr(0, dot));
    }
  }
  if (tensors.empty()) {
    throw MismatchError(
        concat("no key of ", path, " has the prefix '", prefix, "'; prefixes of the file: ",
               prefixes.empty() ? "none" : join_names({prefixes.begin(), prefixes.end()})));
  }
  return load_weights(module, tensors, concat(path, ", '", beginning, "…'"), strict);
}

WeightDifferences load_weights(torch::nn::Module& module, const TensorMap& tensors,
                               const std::string& source, bool strict) {
  auto weights = named_weights(module);
  for (const auto& item : module.named_buffers()) {  // also those that Python's state_dict() lacks
    if (item.value().defined() && tensors.count(item.key()) != 0) {
      weights.emplace(item.key(), item.value().detach());
    }
  }
  return load_weights(weights, with_tied_names(weights, tensors), source, strict);
}

WeightDifferences load_weights(const TensorMap& weights, const TensorMap& tensors,
                               const std::string& source, bool strict) {
  auto differences = compare_weights(weights, tensors);
  if (!differences.wrong_shapes.empty() || (strict && !differences.empty())) {
    throw MismatchError("the weights in " + source +
                        " do not fit the module: " + differences.to_string());
  }
  torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : weights) {
    if (const auto found = tensors.find(name); found != tensors.end()) {
      tensor.detach().copy_(found->second);  // shares memory with the parameter
    }
  }
  return differences;
}

}  // namespace ddp
