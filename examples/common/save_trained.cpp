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

void replace_folder(const fs::path& fresh, const fs::path& folder) {
  const fs::path old = folder.string() + ".old";
  std::error_code failed;
  fs::remove_all(old, failed);
  if (fs::exists(folder)) {
    fs::rename(folder, old, failed);
  }
  if (!failed) {
    fs::rename(fresh, folder, failed);
  }
  if (failed) {
    throw ddp::WriteError("cannot put " + fresh.string() + " in the place of " + folder.string() +
                          ": " + failed.message() + "; the model is whole in the first");
  }
  fs::remove_all(old, failed);
}

bool has_adapters(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& child) {
    const auto* linear = child->template as<models::LinearImpl>();
    return linear != nullptr && linear->has_lora();
  });
}

}  // namespace

void require_writable(const models::Qwen2Impl& module, const std::string& folder) {
  const fs::path parent = fs::path(folder).parent_path();
  std::error_code failed;
  fs::create_directories(parent, failed);
  if (failed || ::access(parent.c_str(), W_OK) != 0) {
    throw ddp::WriteError("lora.save_dir: cannot write in " + parent.string() + ": " +
                          (failed ? failed.message() : std::string(std::strerror(errno))) +
                          "; fix: name a folder that can be written");
  }
  if (has_adapters(module)) {
    models::require_adapter_fits(module, folder);
  }
}

void save_trained(const models::Qwen2Impl& module, const std::string& folder,
                  const std::string& base_path) {
  if (has_adapters(module)) {
    models::save_adapter(module, folder, base_path);
    return;
  }
  const std::string fresh = folder + ".new";
  std::error_code ignored;
  fs::remove_all(fresh, ignored);
  models::save_pretrained(
      module, models::make_hf_config(module.options(), module.head_weight().scalar_type()), fresh);
  replace_folder(fresh, folder);
}

}  // namespace examples
