// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/files.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "pretrained/model_files.hpp"
#include "pretrained/save_model.hpp"

namespace models {
namespace detail {
namespace {

using Weights = std::vector<std::pair<std::string, at::Tensor>>;

// In the module's order, in which transformers shards too.
Weights ordered_weights(const torch::nn::Module& module) {
  Weights weights;
  for (const auto& item : module.named_parameters()) {
    if (item.key().ends_with(".lora_A.weight")) {
      throw std::invalid_argument(
          "the module has an adapter at " + item.key() +
          "; fix: call merge_lora() before saving the model, or save the adapter");
    }
    weights.emplace_back(item.key(), item.value().detach());
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      weights.emplace_back(item.key(), item.value().detach());
    }
  }
  return weights;
}

at::ScalarType saved_dtype(const at::Tensor& tensor, const PretrainedSaveOptions& options) {
  return options.dtype && tensor.is_floating_point() ? *options.dtype : tensor.scalar_type();
}

std::vector<Weights> cut(Weights weights, const PretrainedSaveOptions& options, int64_t& total) {
  std::vector<Weights> shards(1);
  int64_t used = 0;
  for (auto& [name, tensor] : weights) {
    const auto bytes =
        tensor.numel() * static_cast<int64_t>(c10::elementSize(saved_dtype(tensor, options)));
    if (used > 0 && used + bytes > options.max_shard_bytes) {
      shards.emplace_back();
      used = 0;
    }
    used += bytes;
    total += bytes;
    shards.back().emplace_back(std::move(name), std::move(tensor));
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  if (count == 1) {
    return "model.safetensors";
  }
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

at::ScalarType main_dtype(const torch::nn::Module& module) {
  std::map<at::ScalarType, int64_t> count;
  auto most = at::kFloat;
  for (const auto& parameter : module.parameters()) {
    const auto dtype = parameter.scalar_type();
    count[dtype] += parameter.numel();
    most = count[dtype] > count[most] ? dtype : most;
  }
  return most;
}

void save_shards(const torch::nn::Module& module, const std::string& folder,
                 const PretrainedSaveOptions& options) {
  if (options.max_shard_bytes < 1) {
    throw ddp::SettingsError("max_shard_bytes is " + std::to_string(options.max_shard_bytes) +
                             ", expected at least 1");
  }
  int64_t total = 0;
  const auto shards = cut(ordered_weights(module), options, total);
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    ddp::TensorMap tensors;
    for (const auto& [key, tensor] : shards[i]) {
      tensors.emplace(key, tensor.to(saved_dtype(tensor, options)));
      index["weight_map"][key] = name;
    }
    ddp::save_safetensors(folder + "/" + name, tensors, {{"format", "pt"}});
  }
  if (shards.size() > 1) {
    ddp::write_new_file(ddp::system_file_ops(), folder, "model.safetensors.index.json",
                        {index.dump(2) + "\n"}, ddp::kPublicFile);
  }
}

}  // namespace

void save_model(const torch::nn::Module& module, const HfConfig& config, NewFolder& target,
                const PretrainedSaveOptions& options) {
  auto files = options.files;
  files["config.json"] =
      saved_config(options.files, config, options.dtype.value_or(main_dtype(module)));
  for (const auto& [name, text] : files) {
    target.write(name, text);
  }
  save_shards(module, target.temporary(), options);
  target.commit();
}

}  // namespace detail

void save_pretrained(const torch::nn::Module& module, const HfConfig& config,
                     const std::string& folder, const PretrainedSaveOptions& options) {
  detail::NewFolder target(folder, options.replace);
  detail::save_model(module, config, target, options);
}

}  // namespace models
