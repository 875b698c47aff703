// SPDX-License-Identifier: Apache-2.0
#include "pretrained/model_files.hpp"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "pretrained/json_file.hpp"

namespace models {
namespace {

constexpr const char* kConfig = "config.json";

constexpr const char* kTokenizer[] = {
    "tokenizer.json",     "tokenizer_config.json", "tokenizer.model",     "vocab.json",
    "merges.txt",         "added_tokens.json",     "chat_template.jinja", "special_tokens_map.json",
    "chat_template.json",
};

// Files of a model other than its weights and its tokenizer.
constexpr const char* kModel[] = {kConfig, "generation_config.json"};

constexpr uint64_t kMaxBytes = 256 << 20;

void read_if_there(const std::string& folder, const char* name, ModelFiles& files) {
  const std::string path = folder + "/" + name;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    files[name] = detail::read_text_file(path, kMaxBytes);
  }
}

}  // namespace

ModelFiles read_tokenizer_files(const std::string& folder) {
  ModelFiles files;
  for (const char* name : kTokenizer) {
    read_if_there(folder, name, files);
  }
  return files;
}

ModelFiles read_model_files(const std::string& folder) {
  auto files = read_tokenizer_files(folder);
  for (const char* name : kModel) {
    read_if_there(folder, name, files);
  }
  return files;
}

namespace detail {

bool is_model_file(const std::string& name) {
  const auto is_name = [&](const char* known) { return name == known; };
  return std::any_of(std::begin(kModel), std::end(kModel), is_name) ||
         std::any_of(std::begin(kTokenizer), std::end(kTokenizer), is_name);
}

std::string saved_config(const ModelFiles& files, HfConfig config, at::ScalarType dtype) {
  config.dtype = dtype;
  const auto text = hf_config_json(config);  // throws if the config cannot be saved
  const auto found = files.find(kConfig);
  if (found == files.end()) {
    return text;
  }
  const auto name = nlohmann::ordered_json::parse(text).at("torch_dtype");
  auto json = nlohmann::ordered_json::parse(found->second);
  const char* key = json.contains("dtype") ? "dtype" : "torch_dtype";
  if (json.contains(key) && json.at(key) == name) {
    return found->second;
  }
  json[key] = name;
  return json.dump(2) + "\n";
}

}  // namespace detail
}  // namespace models
