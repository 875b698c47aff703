// SPDX-License-Identifier: Apache-2.0
// The two steps of Settings: from YAML to the user's values, and from these to the fields of
// options.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/settings/settings.hpp"

namespace ddp::detail {

constexpr std::size_t kMaxYamlBytes = 1 << 20;
constexpr std::size_t kMaxYamlDepth = 32;  ///< of sections; a list in the innermost is no level
/// yaml-cpp reads keys of at most 1024 bytes, and yaml_text() may write four for one.
constexpr std::size_t kMaxKeyBytes = 250;

/// Parses YAML into values with dotted keys. Throws SettingsError with `name` and line.
std::map<std::string, Settings::UserValue> read_yaml(const std::string& text,
                                                     const std::string& name);

/// Sets the fields that `describe` visits from the user's values. Appends the keys of these fields
/// to `known_keys`.
void read_fields(const std::string& section, const std::function<void(FieldVisitor&)>& describe,
                 std::map<std::string, Settings::UserValue>& given,
                 std::vector<std::string>& known_keys);

}  // namespace ddp::detail
