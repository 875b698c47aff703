// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/snapshot.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdio>
#include <set>

#include "core/files/serialize_tensors.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp::detail {
namespace {

constexpr const char* kModel = "model";

std::string file_of(const std::string& object) {
  return object + ".safetensors";
}

// The model's keys are other programs' keys too; all other keys start with the object's name.
std::string file_key(const std::string& object, const std::string& key) {
  return object == kModel ? key : object + "." + key;
}

// "optimizer.rank_00003.safetensors": the parts of a rank.
std::string parts_file_of(const std::string& object, int rank) {
  return concat(object, '.', rank_file_name(rank));
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

at::ScalarType leaf_type(const std::string& word, const std::string& name) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    if (safetensors_dtype(type, name) == word) {
      return type;
    }
  }
  throw ReadError("the manifest has the unknown dtype '" + word + "' for " + name);
}

// Formats 1 and 2 may hold a master in its parameter's place. It goes to the optimizer, and its
// rounding to the model.
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
      states[optimizer].tensors[{parameter, "master"}] = leaf;
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
  for (const auto& object : objects) {
    const auto* model = dynamic_cast<const DataParallelModel*>(&object.get());
    const auto state = saved.find(object.name());
    if (model == nullptr || state == saved.end()) {
      continue;
    }
    for (const auto& parameter : model->trained_parameters()) {
      const auto found = state->second.tensors.find(parameter.name);
      if (found != state->second.tensors.end() &&
          found->second.scalar_type() != parameter.tensor.scalar_type()) {
        return concat("parameter ", parameter.name, " is ", found->second.scalar_type(),
                      " in the checkpoint and ", parameter.tensor.scalar_type(),
                      " in this run (the trainers' model.dtype); ");
      }
    }
  }
  return "";
}

// Adds the tensors of a rank's file of parts to the objects' states.
void add_parts(std::map<std::string, StateDict>& states, const std::string& name,
               const Safetensors& file) {
  const auto entries = file.metadata.find(kEntriesName);
  if (entries == file.metadata.end()) {
    throw ReadError(name + " does not say what its tensors are: it has no metadata 'entries'");
  }
  for (const auto& entry : parse_entries(entries->second, name)) {
    const auto found = file.tensors.find(file_key(entry.object, entry.key.text()));
    const auto object = states.find(entry.object);
    if (found == file.tensors.end() || object == states.end()) {
      throw ReadError(concat(name, " lists ", entry.key.text(), " of '", entry.object,
                             "', which it does not hold"));
    }
    require_fits(entry, found->second, name);
    auto& parts = object->second.parts[entry.key];
    if (!parts.empty() && !same_order(parts.front().slice, entry.slice)) {
      throw ReadError(concat(name, ": ", entry.key.text(),
                             " has other sizes, or another order in memory, than in another file"));
    }
    parts.push_back({entry.slice, found->second});
  }
}

}  // namespace

void Snapshot::wait() const {
  if (copied) {
    copied->synchronize();
  }
}

std::string Snapshot::first_non_finite() const {
  for (const auto& [name, file] : files) {
    for (const auto& [key, tensor] : file.tensors) {
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

Snapshot take_snapshot(const std::vector<StatefulRef>& objects, int rank, at::Device device,
                       HostBuffers& buffers) {
  Snapshot snapshot;
  auto& rank_file = snapshot.files[rank_file_name(rank)].tensors;
  for (auto& [key, generator] : generators_of(device)) {
    std::lock_guard lock(generator.mutex());
    rank_file[key] = generator.get_state().clone();
  }
  for (const auto& reference : objects) {
    const auto object = reference.name();
    const auto state = reference.get().state_dict();
    snapshot.values[object] = state.values;
    for (const auto& [key, tensor] : state.tensors) {
      const auto text = key.text();
      const bool rank_local = text.starts_with(kRankLocalPrefix);
      if (!rank_local && rank != 0) {
        continue;
      }
      const std::string place = rank_local ? object + "." + text : file_key(object, text);
      auto& file = rank_local ? rank_file : snapshot.files[file_of(object)].tensors;
      file[place] = copy_to_host(tensor, buffers[object + "/" + text]);
    }
    for (const auto& [key, parts] : state.parts) {
      DDP_CHECK(parts.size() == 1, "a rank has one part of a tensor");
      const auto text = key.text();
      auto& file = snapshot.files[parts_file_of(object, rank)];
      file.entries.push_back({object, key, parts.front().slice});
      file.tensors[file_key(object, text)] =
          copy_to_host(parts.front().tensor, buffers[object + "/" + text]);
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
                                          const std::map<std::string, Safetensors>& files, int rank,
                                          at::Device device) {
  std::map<std::string, StateDict> states;
  for (const auto& [object, values] : manifest.values) {
    states[object].values = values;
    if (const auto file = files.find(file_of(object)); file != files.end()) {
      add_tensors(states, object, file->second.tensors);
    }
  }
  split_masters(states, manifest);
  for (const auto& file : manifest.files) {
    if (file.has_parts) {
      add_parts(states, file.name, files.at(file.name));
    }
  }
  const auto rank_file = files.find(rank_file_name(rank));
  if (rank_file != files.end()) {
    for (const auto& [key, tensor] : rank_file->second.tensors) {
      const auto dot = key.find('.');
      const auto object = states.find(key.substr(0, dot));
      if (object != states.end() && key.substr(dot + 1).starts_with(kRankLocalPrefix)) {
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
    restore_generators(rank_file->second.tensors, device);
  }
  return {unused.begin(), unused.end()};
}

}  // namespace ddp::detail
