// SPDX-License-Identifier: Apache-2.0
#include "common/save_trained.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "ddp/core/error.hpp"
#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace examples {
namespace {

namespace fs = std::filesystem;

bool has_adapters(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& child) {
    const auto* linear = child->template as<models::LinearImpl>();
    return linear != nullptr && linear->has_lora();
  });
}

std::string reason() {
  return std::strerror(errno);
}

void require_place(const std::string& folder, const std::string& base_path,
                   const std::string& setting) {
  const auto refuse = [&](const std::string& what) {
    throw ddp::SettingsError(setting + ": " + folder + what + "; fix: name another " + setting);
  };
  std::error_code failed;
  if (fs::exists(fs::symlink_status(folder, failed)) && !fs::is_directory(folder, failed)) {
    refuse(fs::exists(folder, failed) ? " is no folder" : " is a link that leads nowhere");
  }
  if (!base_path.empty() && fs::equivalent(folder, base_path, failed)) {
    refuse(" is the base that this run starts from (model.path): it would be replaced");
  }
}

}  // namespace

void require_writable(const models::Qwen2Impl& module, const std::string& folder,
                      const std::string& base_path, const std::string& setting) {
  require_place(folder, base_path, setting);
  const auto refuse = [&](const std::string& where, const std::string& why) {
    throw ddp::WriteError(setting + ": cannot write in " + where + ": " + why +
                          "; fix: name a folder that can be written");
  };
  std::error_code failed;
  const bool is_there = fs::is_directory(folder, failed);
  // For a link, the files are created next to the link's target.
  const fs::path parent = (is_there ? fs::canonical(folder) : fs::path(folder)).parent_path();
  fs::create_directories(parent, failed);
  if (failed) {
    refuse(parent, failed.message());
  }
  if (::access(parent.c_str(), W_OK | X_OK) != 0) {
    refuse(parent, reason());
  }
  if (is_there && ::access(folder.c_str(), R_OK | W_OK | X_OK) != 0) {
    refuse(folder, reason());
  }
  if (has_adapters(module)) {
    models::require_adapter_fits(module, folder);
  }
}

TrainedFiles read_trained_files(const models::Qwen2Impl& module, const TrainedFrom& from) {
  if (has_adapters(module)) {
    return {};
  }
  if (!from.base_path.empty()) {
    return {.files = models::read_model_files(from.base_path)};
  }
  return {.files = models::read_tokenizer_files(from.tokens_path), .end_tokens = from.end_tokens};
}

void save_trained(const models::Qwen2Impl& module, const std::string& folder,
                  const TrainedFrom& from, const TrainedFiles& beside) {
  if (has_adapters(module)) {
    models::save_adapter(module, folder, from.base_path, from.base_identity);
    return;
  }
  auto config = models::make_hf_config(module.options(), module.head_weight().scalar_type());
  config.eos_token_ids = beside.end_tokens;
  models::save_pretrained(module, config, folder, {.files = beside.files, .replace = true});
}

}  // namespace examples
