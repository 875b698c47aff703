// SPDX-License-Identifier: Apache-2.0
// Collects the tensors of a torch::nn or TorchScript module, each once but for read_parameters.
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <unordered_set>

#include "core/fnv_hash.hpp"
#include "ddp/detail/module_tensors.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"

namespace ddp {
namespace detail {
namespace {

template <typename Named>
void append_once(NamedParameters& list, std::unordered_set<const void*>& seen,
                 const std::string& name, const Named& tensor) {
  if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
    list.push_back({name, tensor});
  }
}

template <typename Entries>
NamedParameters collect_nn(const Entries& entries) {
  NamedParameters list;
  std::unordered_set<const void*> seen;
  for (const auto& entry : entries) {
    append_once(list, seen, entry.key(), entry.value());
  }
  return list;
}

template <typename Entries>
NamedParameters collect_jit(const Entries& entries) {
  NamedParameters list;
  std::unordered_set<const void*> seen;
  for (const auto& entry : entries) {
    append_once(list, seen, entry.name, entry.value);
  }
  return list;
}

// Lists a shared parameter under each of its names.
NamedParameters all_names_of(const std::shared_ptr<torch::nn::Module>& module) {
  NamedParameters list;
  for (const auto& entry : module->named_parameters()) {
    if (entry.value().defined()) {
      list.push_back({entry.key(), entry.value()});
    }
  }
  return list;
}
NamedParameters all_names_of(const torch::jit::Module& module) {
  NamedParameters list;
  for (const auto& entry : module.named_parameters()) {
    list.push_back({entry.name, entry.value});
  }
  return list;
}

// PyTorch's DistributedDataParallel finds them in the same way.
std::vector<std::string> find_sparse(
    const NamedParameters& parameters,
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::unordered_set<const void*> weights;
  for (const auto& module : modules) {
    if (const auto* table = module->as<torch::nn::Embedding>(); table && table->options.sparse()) {
      weights.insert(table->weight.unsafeGetTensorImpl());
    }
    if (const auto* bag = module->as<torch::nn::EmbeddingBag>(); bag && bag->options.sparse()) {
      weights.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  std::vector<std::string> names;
  for (const auto& parameter : parameters) {
    if (weights.contains(parameter.tensor.unsafeGetTensorImpl())) {
      names.push_back(parameter.name);
    }
  }
  return names;
}

bool is_training(const std::shared_ptr<torch::nn::Module>& module) {
  return module->is_training();
}
bool is_training(const torch::jit::Module& module) {
  return module.is_training();
}

template <typename Modules>
uint64_t hash_modes(const Modules& modules) {
  detail::FnvHash hash;
  for (const auto& module : modules) {
    hash.add(is_training(module) ? 1 : 2);
  }
  return hash.value();
}

}  // namespace

ModelTensors tensors_of(const std::shared_ptr<torch::nn::Module>& module) {
  const auto modules = module->modules(/*include_self=*/true);
  auto parameters = collect_nn(module->named_parameters());
  auto sparse = find_sparse(parameters, modules);
  return {.parameters = std::move(parameters),
          .buffers = collect_nn(module->named_buffers()),
          .read_buffers = [module] { return collect_nn(module->named_buffers()); },
          .read_parameters = [module] { return all_names_of(module); },
          .is_training = [module] { return module->is_training(); },
          .training_modes = [modules] { return hash_modes(modules); },
          .has_collective_forward =
              std::any_of(modules.begin(), modules.end(),
                          [](const std::shared_ptr<torch::nn::Module>& child) {
                            const auto* exported = child->as<ExportedModuleImpl>();
                            return child->as<SyncBatchNormImpl>() != nullptr ||
                                   (exported != nullptr && exported->overrides("aten::batch_norm"));
                          }),
          .sparse_parameters = std::move(sparse)};
}

ModelTensors tensors_of(const torch::jit::Module& module) {
  const auto list = module.modules();
  std::vector<torch::jit::Module> modules;
  for (const auto& child : list) {
    modules.push_back(child);
  }
  return {.parameters = collect_jit(module.named_parameters()),
          .buffers = collect_jit(module.named_buffers()),
          .read_buffers = [module] { return collect_jit(module.named_buffers()); },
          .read_parameters = [module] { return all_names_of(module); },
          .is_training = [module] { return module.is_training(); },
          .training_modes = [modules] { return hash_modes(modules); },
          .has_collective_forward = false};
}

uint64_t mode_key(const ModelTensors& tensors) {
  if (tensors.training_modes) {
    return tensors.training_modes();
  }
  return !tensors.is_training || tensors.is_training() ? 1 : 0;
}

}  // namespace detail
}  // namespace ddp
