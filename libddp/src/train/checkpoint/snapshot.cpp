// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/snapshot.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "core/files/serialize_tensors.hpp"
#include "ddp/core/error.hpp"
#include "ddp/optim/optimizer.hpp"
#include "optim/zero/optimizer.hpp"

namespace ddp::detail {
namespace {

constexpr const char* kModel = "model";
constexpr std::string_view kRankLocal = "rank_local.";
constexpr std::string_view kStatePrefix = "state.";
constexpr std::string_view kMasterSuffix = ".master";

std::string file_of(const std::string& object) {
  return object + ".safetensors";
}

// The model's keys are other programs' keys too; all other keys start with the object's name.
std::string file_key(const std::string& object, const std::string& key) {
  return object == kModel ? key : object + "." + key;
}

std::string master_key(const std::string& parameter) {
  return concat(kStatePrefix, parameter, kMasterSuffix);
}

// The random generators of a rank, by key in the rank's file.
std::map<std::string, at::Generator> generators_of(at::Device device) {
  std::map<std::string, at::Generator> generators{
      {"rng.cpu", at::globalContext().defaultGenerator(at::kCPU)}};
  if (!device.is_cpu()) {
    generators["rng.cuda"] = at::globalContext().defaultGenerator(device);
  }
  return generators;
}

// The states of all objects, and the leaves replaced by their masters.
struct Collected {
  std::map<std::string, StateDict> states;
  std::map<std::string, std::map<std::string, std::string>> leaf_dtypes;  // see Manifest
};

// The object whose state holds `parameter` itself, not a parameter of the same name; "" if none.
std::string owner_of(const NamedParameter& parameter,
                     const std::map<std::string, StateDict>& states) {
  for (const auto& [object, state] : states) {
    const auto found = state.tensors.find(parameter.name);
    if (found != state.tensors.end() &&
        found->second.const_data_ptr() == parameter.tensor.const_data_ptr()) {
      return object;
    }
  }
  return "";
}

Collected collect(const std::vector<StatefulRef>& objects) {
  Collected result;
  for (const auto& object : objects) {
    result.states[object.name()] = object.get().state_dict();
  }
  for (const auto& object : objects) {
    const auto* optimizer = dynamic_cast<const Optimizer*>(&object.get());
    if (optimizer == nullptr) {
      continue;
    }
    auto& tensors = result.states[object.name()].tensors;
    for (const auto& parameter : optimizer->named_parameters()) {
      const auto master = tensors.find(master_key(parameter.name));
      const auto model = master != tensors.end() ? owner_of(parameter, result.states) : "";
      if (model.empty()) {
        continue;
      }
      auto& leaf = result.states[model].tensors[parameter.name];
      result.leaf_dtypes[model + "/" + object.name()][parameter.name] =
          safetensors_dtype(leaf.scalar_type(), parameter.name);
      leaf = master->second;
      tensors.erase(master);
    }
  }
  return result;
}

at::ScalarType leaf_type(const std::string& word, const std::string& name) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    if (safetensors_dtype(type, name) == word) {
      return type;
    }
  }
  throw ReadError("the manifest has the unknown dtype '" + word + "' for " + name);
}

// Reverses `collect`: returns the master to the optimizer, and its rounding to the model.
void split_masters(std::map<std::string, StateDict>& states, const Manifest& manifest) {
  for (const auto& [pair, dtypes] : manifest.leaf_dtypes) {
    const auto slash = pair.find('/');
    const auto model = pair.substr(0, slash), optimizer = pair.substr(slash + 1);
    for (const auto& [parameter, dtype] : dtypes) {
      auto& leaf = states[model].tensors[parameter];
      if (!leaf.defined()) {
        throw ReadError(concat("the manifest names a master of ", parameter, ", which is not in ",
                               file_of(model)));
      }
      states[optimizer].tensors[master_key(parameter)] = leaf;
      leaf = leaf.to(leaf_type(dtype, parameter));
    }
  }
}

void add_tensors(std::map<std::string, StateDict>& states, const std::string& object,
                 const TensorMap& file) {
  const std::string prefix = file_key(object, "");
  for (const auto& [key, tensor] : file) {
    if (key.starts_with(prefix)) {
      states[object].tensors[key.substr(prefix.size())] = tensor;
    }
  }
}

// True if no number has all exponent bits set, as inf and NaN have.
template <typename Bits>
bool all_finite(const at::Tensor& tensor, Bits exponent) {
  const auto* numbers = static_cast<const Bits*>(tensor.const_data_ptr());
  bool found = false;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    found |= (numbers[i] & exponent) == exponent;
  }
  return !found;
}

// For a contiguous tensor on the host.
bool all_finite(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return all_finite<uint32_t>(tensor, 0x7F800000U);
    case at::kDouble:
      return all_finite<uint64_t>(tensor, 0x7FF0000000000000U);
    case at::kBFloat16:
      return all_finite<uint16_t>(tensor, 0x7F80U);
    case at::kHalf:
      return all_finite<uint16_t>(tensor, 0x7C00U);
    default:
      return !tensor.is_floating_point() || at::isfinite(tensor.to(at::kFloat)).all().item<bool>();
  }
}

void restore_generators(const TensorMap& rank_file, at::Device device) {
  for (auto& [key, generator] : generators_of(device)) {
    if (const auto state = rank_file.find(key); state != rank_file.end()) {
      std::lock_guard lock(generator.mutex());
      generator.set_state(state->second.clone());
    }
  }
}

// Enqueues a contiguous host copy of `tensor` on the current stream.
at::Tensor copy_to_host(const at::Tensor& tensor, at::Tensor& buffer) {
  if (!buffer.defined() || buffer.scalar_type() != tensor.scalar_type() ||
      buffer.sizes() != tensor.sizes()) {
    buffer =
        at::empty(tensor.sizes(),
                  at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(tensor.is_cuda()));
  }
  at::NoGradGuard no_grad;
  buffer.copy_(tensor, /*non_blocking=*/true);
  return buffer;
}

// A parameter that was saved in another dtype than it has here; empty: none. Its optimizer's state
// does not fit then.
std::string find_other_dtype(const std::vector<StatefulRef>& objects,
                             const std::map<std::string, StateDict>& saved) {
  std::map<std::string, StateDict> own;
  for (const auto& object : objects) {
    own[object.name()] = object.get().state_dict();
  }
  for (const auto& object : objects) {
    const auto* optimizer = dynamic_cast<const Optimizer*>(&object.get());
    for (const auto& parameter :
         optimizer != nullptr ? optimizer->named_parameters() : NamedParameters()) {
      const auto owner = saved.find(owner_of(parameter, own));
      if (owner == saved.end()) {
        continue;
      }
      const auto found = owner->second.tensors.find(parameter.name);
      if (found != owner->second.tensors.end() &&
          found->second.scalar_type() != parameter.tensor.scalar_type()) {
        return concat("parameter ", parameter.name, " is ", found->second.scalar_type(),
                      " in the checkpoint and ", parameter.tensor.scalar_type(),
                      " in this run (the trainers' model.dtype); ");
      }
    }
  }
  return "";
}

}  // namespace

void Snapshot::wait() const {
  if (copied) {
    copied->synchronize();
  }
}

std::string Snapshot::first_non_finite() const {
  for (const auto& [file, tensors] : files) {
    for (const auto& [key, tensor] : tensors) {
      if (!all_finite(tensor)) {
        return key;
      }
    }
  }
  return "";
}

std::string rank_file_name(int rank) {
  char text[40];
  std::snprintf(text, sizeof text, "rank_%05d.safetensors", rank);
  return text;
}

bool is_collective(const std::vector<StatefulRef>& objects) {
  return std::any_of(objects.begin(), objects.end(), [](const StatefulRef& object) {
    return dynamic_cast<const ZeroOptimizer*>(&object.get()) != nullptr;
  });
}

Snapshot take_snapshot(const std::vector<StatefulRef>& objects, int rank, at::Device device,
                       HostBuffers& buffers) {
  const auto collected = collect(objects);
  Snapshot snapshot;
  snapshot.leaf_dtypes = collected.leaf_dtypes;
  auto& rank_file = snapshot.files[rank_file_name(rank)];
  for (auto& [key, generator] : generators_of(device)) {
    std::lock_guard lock(generator.mutex());
    rank_file[key] = generator.get_state().clone();
  }
  for (const auto& [object, state] : collected.states) {
    snapshot.values[object] = state.values;
    for (const auto& [key, tensor] : state.tensors) {
      const bool rank_local = key.starts_with(kRankLocal);
      if (!rank_local && rank != 0) {
        continue;
      }
      const std::string place = rank_local ? object + "." + key : file_key(object, key);
      auto& file = rank_local ? rank_file : snapshot.files[file_of(object)];
      file[place] = copy_to_host(tensor, buffers[object + "/" + key]);
    }
  }
  if (!device.is_cpu()) {
    // The training thread continues at once; the writing thread waits for this point of the stream.
    const c10::impl::VirtualGuardImpl guard(device.type());
    snapshot.copied = std::make_shared<c10::Event>(device.type());
    snapshot.copied->record(guard.getStream(device));
  }
  return snapshot;
}

std::vector<std::string> restore_snapshot(const std::vector<StatefulRef>& objects,
                                          const Manifest& manifest,
                                          const std::map<std::string, TensorMap>& files, int rank,
                                          at::Device device) {
  std::map<std::string, StateDict> states;
  for (const auto& [object, values] : manifest.values) {
    states[object].values = values;
    if (const auto file = files.find(file_of(object)); file != files.end()) {
      add_tensors(states, object, file->second);
    }
  }
  split_masters(states, manifest);
  const auto rank_file = files.find(rank_file_name(rank));
  if (rank_file != files.end()) {
    for (const auto& [key, tensor] : rank_file->second) {
      const auto dot = key.find('.');
      const auto object = states.find(key.substr(0, dot));
      if (object != states.end() && std::string_view(key).substr(dot + 1).starts_with(kRankLocal)) {
        object->second.tensors[key.substr(dot + 1)] = tensor;
      }
    }
  }
  std::set<std::string> unused;
  for (const auto& [name, state] : states) {
    unused.insert(name);
  }
  for (const auto& object : objects) {
    const auto name = object.name();
    if (unused.erase(name) == 0) {
      throw MismatchError(concat("it has no state of '", name, "', which this program saves"));
    }
    try {
      object.get().load_state_dict(states[name]);
    } catch (const MismatchError& error) {
      const bool has_several = name != object.get().state_name();
      throw MismatchError(concat(find_other_dtype(objects, states),
                                 has_several ? concat("'", name, "': ") : "", error.what()));
    }
  }
  if (rank_file != files.end()) {
    restore_generators(rank_file->second, device);
  }
  return {unused.begin(), unused.end()};
}

}  // namespace ddp::detail
