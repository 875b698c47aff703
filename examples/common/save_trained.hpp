// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "models/qwen2.hpp"

namespace examples {

/// Writes what a run trained into `folder`, in place of what was there: adapters in PEFT's layout
/// where `module` has them (`base_path` is noted as their base), else the whole model in Hugging
/// Face's. The old folder stays until the new one is complete. On one rank. Throws ddp::WriteError.
void save_trained(const models::Qwen2Impl& module, const std::string& folder,
                  const std::string& base_path);

/// Throws ddp::WriteError where `folder` cannot be made, ddp::SettingsError where it holds another
/// adapter: what save_trained() would say after hours of training. Leaves `folder` as it is.
void require_writable(const models::Qwen2Impl& module, const std::string& folder);

}  // namespace examples
