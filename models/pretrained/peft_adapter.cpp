// SPDX-License-Identifier: Apache-2.0
#include "models/pretrained/peft_adapter.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/detail/files.hpp"
#include "linear_layers.hpp"
#include "pretrained/adapter_config.hpp"
#include "pretrained/json_file.hpp"
#include "pretrained/new_folder.hpp"

namespace models {
namespace {

using ddp::concat;
using detail::AdapterConfig;

constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kA = ".lora_A.weight";
constexpr std::string_view kB = ".lora_B.weight";
constexpr const char* kBaseIdentity = "base_identity";  // key in the weights' metadata

std::string key_of(const std::string& layer, std::string_view half) {
  return concat(kPrefix, layer, half);
}

using Linears = std::vector<ddp::ops::LinearLayer>;

ddp::NamedParameters base_parameters(const torch::nn::Module& module) {
  ddp::NamedParameters base;
  for (const auto& item : module.named_parameters()) {
    const auto key = '.' + item.key();  // a linear layer alone has no name
    if (!key.ends_with(kA) && !key.ends_with(kB)) {
      base.push_back({item.key(), item.value()});
    }
  }
  return base;
}

// PEFT's files hold nothing else that may be trained too, such as a bias or a norm.
void warn_of_others(const torch::nn::Module& module) {
  std::string first;
  int64_t count = 0;
  for (const auto& [name, parameter] : base_parameters(module)) {
    if (parameter.requires_grad()) {
      first = count++ == 0 ? name : first;
    }
  }
  if (count > 0) {
    ddp::log_warning(concat("save_adapter: ", count,
                            " trained parameters are no part of an adapter "
                            "and are not saved, the first is ",
                            first, "; fix: save a checkpoint of the model too, or freeze them"));
  }
}

struct AdapterFiles {
  AdapterConfig config;
  ddp::TensorMap tensors;           // under PEFT's keys
  std::vector<std::string> layers;  // each with A and B of rank r
  std::string folder;
  std::string base_identity;
};

void check_tensor(const AdapterFiles& files, const std::string& key, int64_t rank_dimension) {
  const auto found = files.tensors.find(key);
  const std::string path = files.folder + "/" + detail::kAdapterWeights;
  if (found == files.tensors.end()) {
    throw ddp::ReadError(path + " lacks '" + key + "', the other half of a layer's adapter");
  }
  const auto& tensor = found->second;
  if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kBFloat16 &&
      tensor.scalar_type() != at::kHalf) {
    throw ddp::ReadError(concat(path, ": the tensor '", key, "' is of dtype ",
                                at::toString(tensor.scalar_type()),
                                "; adapters are float32, bfloat16 or float16"));
  }
  if (tensor.dim() != 2 || tensor.size(rank_dimension) != files.config.lora.rank) {
    throw ddp::ReadError(concat(path, ": '", key, "' is ", tensor.sizes(), ", but ",
                                detail::kAdapterConfig, " says r = ", files.config.lora.rank));
  }
}

// The weights name the adapted layers. The config must agree: PEFT adapts the layers of
// target_modules, but none of exclude_modules.
void check_targets(const AdapterFiles& files) {
  const auto& config = files.config;
  const auto fail = [&](const std::string& what) {
    throw ddp::ReadError(files.folder + ": " + detail::kAdapterConfig + " and " +
                         detail::kAdapterWeights + " disagree: " + what);
  };
  const auto names = [](const std::vector<std::string>& modules, const std::string& layer) {
    return std::any_of(modules.begin(), modules.end(),
                       [&](const auto& module) { return detail::names_layer(module, layer); });
  };
  const auto& targets = config.lora.target_modules;
  for (const auto& layer : files.layers) {
    if (config.lists_modules && !names(targets, layer)) {
      fail("the layer '" + layer + "' is not of target_modules");
    }
    if (names(config.exclude_modules, layer)) {
      fail("the layer '" + layer + "' is of exclude_modules");
    }
  }
  for (const auto& target : targets) {
    const auto is_target = [&](const auto& name) { return detail::names_layer(target, name); };
    // A target without layers may have lost them all to exclude_modules.
    const bool may_be_excluded =
        !config.lists_excluded || names(config.exclude_modules, target) ||
        std::any_of(config.exclude_modules.begin(), config.exclude_modules.end(), is_target);
    if (!may_be_excluded && std::none_of(files.layers.begin(), files.layers.end(), is_target)) {
      fail("no layer of target_modules' \"" + target + "\" is in the file");
    }
  }
}

AdapterFiles open_adapter(const std::string& folder) {
  AdapterFiles files{.config = detail::read_adapter_config(folder + "/" + detail::kAdapterConfig),
                     .tensors = {},
                     .layers = {},
                     .folder = folder,
                     .base_identity = {}};
  const std::string path = folder + "/" + detail::kAdapterWeights;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored) &&
      std::filesystem::exists(folder + "/adapter_model.bin", ignored)) {
    throw ddp::ReadError(path +
                         " is missing: save adapter_model.bin again as safetensors (PEFT: "
                         "save_pretrained)");
  }
  auto weights = ddp::load_safetensors(path);
  files.tensors = std::move(weights.tensors);
  files.base_identity = weights.metadata[kBaseIdentity];
  std::set<std::string> layers;
  for (const auto& [key, tensor] : files.tensors) {
    const bool half = key.ends_with(kA) || key.ends_with(kB);
    if (!half || !key.starts_with(kPrefix) || key.size() <= kPrefix.size() + kA.size()) {
      throw ddp::SettingsError(path + " holds '" + key +
                               "', which is no part of a plain LoRA adapter of linear layers");
    }
    layers.insert(key.substr(kPrefix.size(), key.size() - kPrefix.size() - kA.size()));
  }
  for (const auto& layer : layers) {
    files.layers.push_back(layer);
    check_tensor(files, key_of(layer, kA), 0);
    check_tensor(files, key_of(layer, kB), 1);
  }
  if (files.layers.empty()) {
    throw ddp::ReadError(path + " holds no tensor");
  }
  check_targets(files);
  return files;
}

[[noreturn]] void fail_fit(const AdapterFiles& files, const std::string& why) {
  throw ddp::MismatchError("the adapter in " + files.folder + " does not fit the model: " + why);
}

// Meta tensors of A and B for the given layers, under PEFT's keys.
ddp::TensorMap adapter_shapes(const Linears& linears, const std::set<std::string>& layers,
                              int64_t rank) {
  ddp::TensorMap shapes;
  const auto meta = at::TensorOptions().device(at::kMeta);
  for (const auto& linear : linears) {
    if (layers.count(linear.name) != 0) {
      shapes[key_of(linear.name, kA)] = at::empty({rank, linear.weight.size(1)}, meta);
      shapes[key_of(linear.name, kB)] = at::empty({linear.weight.size(0), rank}, meta);
    }
  }
  return shapes;
}

void check_fit(const AdapterFiles& files, const ddp::TensorMap& shapes) {
  const auto differences = ddp::compare_weights(shapes, files.tensors);
  if (!differences.empty()) {
    fail_fit(files, differences.to_string() + " (an adapter of another base or of other layers)");
  }
}

void copy_in(const AdapterFiles& files, const Linears& linears) {
  const torch::NoGradGuard no_grad;
  for (const auto& linear : linears) {
    if (linear.lora_a.defined()) {
      linear.lora_a.copy_(files.tensors.at(key_of(linear.name, kA)));
      linear.lora_b.copy_(files.tensors.at(key_of(linear.name, kB)));
    }
  }
}

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

// The last parts of the names of modules without an adapter. PEFT would adapt these modules too if
// target_modules listed such a part.
std::set<std::string> ambiguous_parts(const torch::nn::Module& module, const Linears& linears) {
  std::set<std::string> adapted, parts;
  for (const auto& linear : linears) {
    (linear.lora_a.defined() ? adapted : parts).insert(linear.name);
  }
  for (const auto& name : module.named_modules("", /*include_self=*/false).keys()) {
    parts.insert(name);
  }
  std::set<std::string> ambiguous;
  for (const auto& name : parts) {
    if (adapted.count(name) == 0) {
      ambiguous.insert(last_part(name));
    }
  }
  return ambiguous;
}

// Describes all adapters in the module; throws std::invalid_argument if they differ.
AdapterConfig adapter_of(const torch::nn::Module& module, const Linears& linears) {
  AdapterConfig config;
  config.lora.target_modules.clear();
  detail::visit_linears(
      module, [](const LinearImpl&, const std::string&) {},
      [&](const ddp::ops::LinearOwner&, const std::string&) { config.is_causal_lm = false; });
  for (const auto& linear : linears) {
    const auto& name = linear.name;
    if (!linear.lora_a.defined()) {
      continue;
    }
    const int64_t rank = linear.lora_a.size(0);
    const double alpha = linear.lora_alpha;
    auto& layers = config.lora.target_modules;
    if (!layers.empty() && (rank != config.lora.rank || alpha != config.lora.alpha)) {
      throw std::invalid_argument("the adapters at " + layers.back() + " and " + name +
                                  " have different rank or alpha");
    }
    config.lora.rank = rank;
    config.lora.alpha = alpha;
    config.lora.dropout = linear.lora_dropout;
    layers.push_back(name);
  }
  if (config.lora.target_modules.empty()) {
    throw std::invalid_argument("the module has no adapter: call add_lora first");
  }
  // Uses short names if they select the same layers, in the order of the layers.
  const auto ambiguous = ambiguous_parts(module, linears);
  std::vector<std::string> names;
  for (const auto& layer : config.lora.target_modules) {
    const auto last = last_part(layer);
    const auto& name = ambiguous.count(last) == 0 ? last : layer;
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  config.lora.target_modules = names;
  return config;
}

}  // namespace

PeftAdapter read_adapter(const std::string& folder) {
  auto files = open_adapter(folder);
  PeftAdapter adapter{.lora = files.config.lora,
                      .base_model = files.config.base_model,
                      .base_identity = files.base_identity};
  adapter.lora.target_modules = std::move(files.layers);
  return adapter;
}

std::string base_identity(const torch::nn::Module& module) {
  const auto base = base_parameters(module);
  return base.empty() ? ""
                      : base_identity(base.front().tensor.scalar_type(), ddp::fingerprint_of(base));
}

std::string base_identity(const torch::nn::Module& module, torch::Dtype dtype) {
  auto base = base_parameters(module);
  for (auto& [name, tensor] : base) {
    tensor = tensor.detach().to(dtype);
  }
  return base_identity(dtype, ddp::fingerprint_of(base));
}

std::string base_identity(torch::Dtype dtype, const std::string& fingerprint) {
  return concat(dtype, ' ', fingerprint);
}

void require_base(const std::string& folder, const std::string& identity) {
  const auto adapter = read_adapter(folder);
  const auto& trained = adapter.base_identity;
  if (trained.empty() || trained == identity) {
    return;
  }
  const auto text = concat("the adapter in ", folder, " was trained over another base: ", trained,
                           adapter.base_model.empty() ? "" : " (" + adapter.base_model + ")",
                           ", here ", identity);
  const auto dtype_of = [](const std::string& of) { return of.substr(0, of.find(' ')); };
  if (dtype_of(trained) == dtype_of(identity)) {
    throw ddp::MismatchError(text + "; fix: use that base");
  }
  ddp::log_warning(text + "; it is unknown whether only the dtype differs");
}

LoraSummary add_adapter(torch::nn::Module& module, const std::string& folder, torch::Dtype dtype) {
  const auto files = open_adapter(folder);
  const std::set<std::string> layers(files.layers.begin(), files.layers.end());
  check_fit(files, adapter_shapes(detail::linear_layers(module), layers, files.config.lora.rank));
  auto options = files.config.lora;
  options.target_modules = files.layers;
  options.dtype = dtype;
  const auto summary = add_lora(module, options);
  copy_in(files, detail::linear_layers(module));
  return summary;
}

void load_adapter(torch::nn::Module& module, const std::string& folder) {
  const auto linears = detail::linear_layers(module);
  const auto own = adapter_of(module, linears).lora;
  const auto files = open_adapter(folder);
  const auto& stored = files.config.lora;
  if (stored.rank != own.rank) {
    fail_fit(files, concat("its rank (r) is ", stored.rank, ", the model's is ", own.rank));
  }
  if (stored.alpha != own.alpha) {
    fail_fit(files, concat("its lora_alpha is ", stored.alpha, ", the model's is ", own.alpha));
  }
  std::set<std::string> layers;
  for (const auto& linear : linears) {
    if (linear.lora_a.defined()) {
      layers.insert(linear.name);
    }
  }
  check_fit(files, adapter_shapes(linears, layers, own.rank));
  copy_in(files, linears);
}

void require_adapter_fits(const torch::nn::Module& module, const std::string& folder) {
  const auto config = adapter_of(module, detail::linear_layers(module));
  // If a job ended between the two files, new weights would be read with the old rank, alpha or
  // layers.
  const std::string path = folder + "/" + detail::kAdapterConfig;
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    const auto old = detail::read_adapter_config(path).lora;
    if (old.rank != config.lora.rank || old.alpha != config.lora.alpha ||
        old.target_modules != config.lora.target_modules) {
      throw ddp::SettingsError(path +
                               " is there and describes another adapter (its rank, alpha or "
                               "layers): name another folder, or remove this one");
    }
  }
}

void save_adapter(const torch::nn::Module& module, const std::string& folder,
                  const std::string& base_model, const std::string& base_identity) {
  const auto linears = detail::linear_layers(module);
  auto config = adapter_of(module, linears);
  config.base_model = base_model;
  const std::string json = detail::adapter_config_json(config);
  warn_of_others(module);
  ddp::TensorMap tensors;
  for (const auto& linear : linears) {
    if (linear.lora_a.defined()) {
      tensors[key_of(linear.name, kA)] = linear.lora_a.detach();
      tensors[key_of(linear.name, kB)] = linear.lora_b.detach();
    }
  }
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (!base_identity.empty()) {
    metadata[kBaseIdentity] = base_identity;
  }
  const auto save_in = [&](const std::string& into) {
    ddp::save_safetensors(into + "/" + detail::kAdapterWeights, tensors, metadata);
  };
  if (!detail::holds_files(folder)) {
    detail::NewFolder target(folder);
    target.write(detail::kAdapterConfig, json);
    save_in(target.temporary());
    target.commit();
    return;
  }
  require_adapter_fits(module, folder);
  const std::string path = folder + "/" + detail::kAdapterConfig;
  ddp::replace_file(ddp::system_file_ops(), path, {json});
  save_in(folder);
}

}  // namespace models
