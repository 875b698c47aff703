// SPDX-License-Identifier: Apache-2.0
// The text of --help. Lines are at most `width` columns long, unless one word is longer.
#pragma once

#include <string>

#include "core/settings/setting_row.hpp"

namespace ddp {

/// The short page: usage, options, sections, most used settings and exit codes.
std::string help_page(const std::string& program, const SettingRows& defaults, std::size_t width);

/// The settings of a section, of one key, of all keys that start with `topic`, or of "all", with
/// default, meaning and allowed values. Throws SettingsError, which names similar topics.
std::string help_topic(const std::string& topic, const SettingRows& defaults, std::size_t width);

namespace detail {

/// The sections of `rows`, in order.
std::vector<std::string> sections_of(const SettingRows& rows);

}  // namespace detail
}  // namespace ddp
