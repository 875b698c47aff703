// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "core/settings.hpp"

namespace ddp::detail {

constexpr std::size_t kMaxYamlBytes = 1 << 20;
constexpr std::size_t kMaxYamlDepth = 32;

/// Parses YAML into values with dotted keys. Throws SettingsError with `name` and line.
std::map<std::string, Settings::Given> read_yaml(const std::string& text, const std::string& name);

}  // namespace ddp::detail
