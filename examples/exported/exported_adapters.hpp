// SPDX-License-Identifier: Apache-2.0
// Section lora of exported_ddp, and the files of trained weights and adapters.
#pragma once

#include <string>

#include "ddp/comm/context.hpp"
#include "exported/exported_settings.hpp"
#include "language/language_options.hpp"

namespace examples {

/// LoraSettings with rank 0 as the default. Its save_dir is the folder of one adapter.
struct ExportedLora : LoraSettings {
  ExportedLora() { options.rank = 0; }
};
void describe_fields(ExportedLora& settings, ddp::FieldVisitor& visitor);

/// Adds the adapters, if any, to a module that is not wrapped yet, and prints their size. Throws
/// SettingsError if the settings do not fit the module or the files that they name.
void add_adapters(ddp::ExportedModule module, const ExportedSettings& settings,
                  const ExportedLora& lora, const ddp::Context& ctx);

/// Writes lora.save_dir and model.save_weights on rank 0, each if it is set. Merges the adapters
/// into the weights of the second, so this is the last use of the module.
void save_trained(ddp::ExportedModule module, const ExportedSettings& settings,
                  const ExportedLora& lora, const ddp::Context& ctx);

}  // namespace examples
