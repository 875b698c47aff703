// SPDX-License-Identifier: Apache-2.0
#include "exported/exported_adapters.hpp"

#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <string>

#include "ddp/core/error.hpp"
#include "ddp/train/weights.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace examples {
namespace {

namespace fs = std::filesystem;

// `folder` need not exist if the writer makes it.
void require_writable(const std::string& setting, fs::path folder, bool is_made) {
  std::error_code ignored;
  folder = fs::absolute(folder, ignored);
  while (is_made && !fs::exists(folder, ignored) && folder.has_relative_path()) {
    folder = folder.parent_path();
  }
  if (!fs::is_directory(folder, ignored)) {
    throw ddp::WriteError(ddp::concat(setting, ": the folder ", folder.string(),
                                      " does not exist; fix: create it, or set another path"));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw ddp::WriteError(ddp::concat(setting, ": this user may not write to ", folder.string(),
                                      "; fix: set another path"));
  }
}

// Throws what else would end a run after its training.
void check_targets(const ExportedSettings& settings, const ExportedLora& lora) {
  std::error_code ignored;
  if (const fs::path file = settings.save_weights; !file.empty()) {
    const auto setting = "model.save_weights=" + settings.save_weights;
    if (fs::equivalent(file, settings.path, ignored)) {
      throw ddp::SettingsError(setting +
                               " is the archive of model.path, which would be lost; fix: "
                               "set another file");
    }
    if (fs::is_directory(file, ignored)) {
      throw ddp::SettingsError(setting + " is a folder; fix: name a file in it");
    }
    require_writable(setting, fs::absolute(file, ignored).parent_path(), /*is_made=*/false);
  }
  if (!lora.save_dir.empty()) {
    require_writable("lora.save_dir=" + lora.save_dir, lora.save_dir, /*is_made=*/true);
  }
}

void check_saving(const ddp::ExportedModuleImpl& module, const ExportedSettings& settings,
                  const ExportedLora& lora) {
  if (!lora.save_dir.empty()) {
    models::require_adapter_fits(module, lora.save_dir);
  }
  for (const auto& layer : module.linears()) {
    if (!settings.save_weights.empty() && layer.lora_a.defined() && layer.shares_weight) {
      throw ddp::SettingsError(
          ddp::concat("model.save_weights needs adapters that can be merged, but other operators ",
                      "read the weight of ", layer.name,
                      " too; fix: leave this layer out of lora.target_modules, or save with "
                      "lora.save_dir alone"));
    }
  }
}

}  // namespace

void describe_fields(ExportedLora& s, ddp::FieldVisitor& v) {
  describe_adapter_fields(s, v);
  v.field({.name = "save_dir",
           .doc = "Folder for the trained adapter in PEFT's layout. An adapter of the same rank, "
                  "alpha and layers is replaced. Empty: none.",
           .may_differ = true},
          s.save_dir);
}

void add_adapters(ddp::ExportedModule module, const ExportedSettings& settings,
                  const ExportedLora& lora, const ddp::Context& ctx) {
  if (lora.options.rank == 0 && !lora.save_dir.empty()) {
    throw ddp::SettingsError("lora.save_dir=" + lora.save_dir +
                             " has no effect with lora.rank=0, which trains the whole model; fix: "
                             "set lora.rank, or use model.save_weights");
  }
  if (ctx.is_main()) {
    check_targets(settings, lora);
  }
  const auto summary = add_adapters(*module, lora);
  if (lora.options.rank == 0) {
    return;
  }
  check_saving(*module, settings, lora);
  if (ctx.is_main()) {
    if (!lora.adapter.empty()) {
      models::require_base(lora.adapter, models::base_identity(*module));
    }
    std::cout << "adapters on " << summary.layers.size() << " layers: " << summary.num_trainable
              << " of " << summary.num_trainable + summary.num_frozen << " parameters are trained\n"
              << std::flush;
  }
}

void save_trained(ddp::ExportedModule module, const ExportedSettings& settings,
                  const ExportedLora& lora, const ddp::Context& ctx) {
  if (!ctx.is_main()) {
    return;
  }
  if (!lora.save_dir.empty()) {
    models::save_adapter(*module, lora.save_dir, "", models::base_identity(*module));
    std::cout << "adapter saved in " << lora.save_dir << '\n';
  }
  if (!settings.save_weights.empty()) {
    models::merge_lora(*module);
    ddp::save_weights(*module, settings.save_weights);
    std::cout << "weights saved in " << settings.save_weights
              << (settings.ema_decay > 0 ? " (the averages)" : "") << '\n';
  }
  std::cout << std::flush;
}

}  // namespace examples
