// SPDX-License-Identifier: Apache-2.0
#include "common/exported_adapters.hpp"

#include <iostream>

#include "ddp/core/error.hpp"
#include "ddp/train/weights.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace examples {
namespace {

// Else a run would fail at its end.
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
  }
  if (!settings.save_weights.empty()) {
    models::merge_lora(*module);
    ddp::save_weights(*module, settings.save_weights);
  }
}

}  // namespace examples
