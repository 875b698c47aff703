// SPDX-License-Identifier: Apache-2.0
// What a resumed run sets otherwise than the run that saved. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace ddp::detail {

/// Both texts are settings_yaml()'s. Left out are the sections that say where files lie and how
/// fast the run goes: checkpoint, metrics, context, data, loader. "lr_schedule.lr=0.1, it had 0.5".
/// Empty where a text is not a YAML of settings.
std::vector<std::string> changed_settings(const std::string& saved, const std::string& now);

}  // namespace ddp::detail
