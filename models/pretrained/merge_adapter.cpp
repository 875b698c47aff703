// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "ddp/core/error.hpp"
#include "models/pretrained/peft_adapter.hpp"
#include "pretrained/json_file.hpp"
#include "pretrained/new_folder.hpp"
#include "pretrained/save_shards.hpp"
#include "pretrained/stored_weights.hpp"

namespace models {
namespace {

// What belongs to a model beside its weights and its configuration.
constexpr const char* kCopied[] = {
    "generation_config.json", "tokenizer.json",      "tokenizer_config.json",
    "tokenizer.model",        "vocab.json",          "merges.txt",
    "added_tokens.json",      "chat_template.jinja", "special_tokens_map.json",
    "chat_template.json",
};

constexpr uint64_t kMaxCopiedBytes = 256 << 20;

// The dtype of most bytes in the files.
at::ScalarType stored_dtype(const std::string& path) {
  const auto stored = detail::open_stored_weights(path);
  std::map<std::string, uint64_t> bytes;
  const detail::StoredTensor* most = nullptr;
  for (const auto& tensor : stored.tensors) {
    bytes[tensor.dtype] += tensor.num_bytes;
    most = most == nullptr || bytes[tensor.dtype] > bytes[most->dtype] ? &tensor : most;
  }
  return most == nullptr ? at::kFloat : detail::weight_dtype(*most);
}

// The base's own file, so that keys unknown here survive.
std::string merged_config(const std::string& base, at::ScalarType dtype, const HfConfig& config) {
  if (config.dtype == dtype) {
    return detail::read_text_file(base + "/config.json");
  }
  auto saved = config;
  saved.dtype = dtype;
  const auto ours = nlohmann::ordered_json::parse(hf_config_json(saved));
  auto json = nlohmann::ordered_json::parse(detail::read_text_file(base + "/config.json"));
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = ours.at("torch_dtype");
  return json.dump(2) + "\n";
}

}  // namespace

void merge_adapter(const std::string& base, const std::string& adapter, const std::string& output,
                   const PretrainedSaveOptions& options) {
  const auto config = read_hf_config(base);
  const auto dtype = options.dtype.value_or(stored_dtype(base));
  detail::NewFolder target(output);  // before the work: a name that is taken is told at once
  auto model = make_causal_lm(config, at::TensorOptions().dtype(dtype));
  load_pretrained(*model, base);
  add_adapter(*model, adapter);
  merge_lora(*model);
  target.write("config.json", merged_config(base, dtype, config));
  for (const char* name : kCopied) {
    const std::string path = base + "/" + name;
    std::error_code ignored;
    if (std::filesystem::is_regular_file(path, ignored)) {
      target.write(name, detail::read_text_file(path, kMaxCopiedBytes));
    }
  }
  detail::save_shards(*model, target.temporary(), options);
  target.commit();
}

}  // namespace models
