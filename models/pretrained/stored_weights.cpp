// SPDX-License-Identifier: Apache-2.0
#include "pretrained/stored_weights.hpp"

#include <filesystem>
#include <fstream>
#include <set>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/detail/list_safetensors.hpp"
#include "pretrained/json_file.hpp"

namespace models::detail {
namespace {

namespace fs = std::filesystem;
using ddp::concat;
using ddp::ReadError;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

void add_file(StoredWeights& stored, const std::string& path) {
  for (auto& tensor : ddp::list_safetensors(path)) {
    stored.tensors.push_back({.name = std::move(tensor.name),
                              .dtype = std::move(tensor.dtype),
                              .shape = std::move(tensor.shape),
                              .file = stored.files.size(),
                              .offset = tensor.offset,
                              .num_bytes = tensor.num_bytes});
  }
  stored.files.push_back(path);
}

// Maps each tensor to its shard. Refuses names with a folder, which could point to any file.
std::map<std::string, std::string> read_index(const JsonObject& index) {
  const auto weight_map = index.object("weight_map");
  std::map<std::string, std::string> shards;
  for (const auto& [name, value] : weight_map.json().items()) {
    const std::string shard = weight_map.text(name);
    if (shard.empty() || shard.find('/') != std::string::npos || shard == "..") {
      weight_map.fail(name,
                      weight_map.shown(name) + ", expected the name of a file in the same folder");
    }
    shards.emplace(name, shard);
  }
  return shards;
}

StoredWeights open_index(const std::string& path) {
  StoredWeights all{.source = path};
  const auto shard_of = read_index(JsonObject(path));
  const auto folder = fs::path(path).parent_path();
  std::set<std::string> shards;
  for (const auto& [name, shard] : shard_of) {
    shards.insert(shard);
  }
  for (const auto& shard : shards) {
    const std::string shard_path = (folder / shard).string();
    std::error_code ignored;
    if (!fs::exists(shard_path, ignored)) {
      throw ReadError(concat("the shard ", shard_path, " is missing: ", path, " names it (",
                             shards.size(), " shards)"));
    }
    add_file(all, shard_path);
  }
  StoredWeights stored{.source = path, .files = all.files};
  std::set<std::string> found;
  for (auto& tensor : all.tensors) {
    const std::string shard = fs::path(all.files[tensor.file]).filename().string();
    const auto expected = shard_of.find(tensor.name);
    // Ignores a copy in another shard than the index names, as transformers does.
    if (expected == shard_of.end() || expected->second == shard) {
      found.insert(tensor.name);
      stored.tensors.push_back(std::move(tensor));
    }
  }
  for (const auto& [name, shard] : shard_of) {
    if (found.count(name) == 0) {
      throw ReadError(path + " says that " + shard + " holds '" + name + "', but it does not");
    }
  }
  return stored;
}

StoredWeights open_single(const std::string& path) {
  StoredWeights stored{.source = path};
  add_file(stored, path);
  return stored;
}

}  // namespace

StoredWeights open_stored_weights(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    return path.ends_with(".json") ? open_index(path) : open_single(path);
  }
  if (fs::exists(path + "/" + kSingle, ignored)) {
    return open_single(path + "/" + kSingle);
  }
  if (fs::exists(path + "/" + kIndex, ignored)) {
    return open_index(path + "/" + kIndex);
  }
  const bool pickled = fs::exists(path + "/pytorch_model.bin", ignored) ||
                       fs::exists(path + "/pytorch_model.bin.index.json", ignored);
  throw ReadError(path + " holds neither " + kSingle + " nor " + kIndex +
                  (pickled ? "; fix: save its pytorch_model.bin again as safetensors "
                             "(transformers: save_pretrained)"
                           : ""));
}

}  // namespace models::detail
