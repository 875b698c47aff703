// SPDX-License-Identifier: Apache-2.0
// The keys of options structs as rows, and all text printed from these rows.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"

namespace ddp {

/// One key with its current value.
struct SettingRow {
  enum class Type { Bool, Integer, Number, Text, IntegerList, NumberList, TextList };

  std::string key;  ///< with its section: "train.batch_size"
  Type type = Type::Text;
  std::vector<std::string> values;  ///< one string, or the items of a list
  Field field;

  bool is_list() const { return type >= Type::IntegerList; }
  /// The value as written after "key=": "128", "true", "[1, 2]".
  std::string text() const;
  /// The allowed values: "integer >= 1", "one of bf16, fp16, off".
  std::string allowed() const;
};

using SettingRows = std::vector<SettingRow>;

namespace detail {
void list_settings(const std::string& section, const std::function<void(FieldVisitor&)>& describe,
                   SettingRows& rows);
}  // namespace detail

/// The rows of `options`, keys "<section>.<key>".
template <typename T>
SettingRows list_settings(const std::string& section, T options) {
  SettingRows rows;
  detail::list_settings(
      section, [&](FieldVisitor& visitor) { describe_fields(options, visitor); }, rows);
  return rows;
}

/// YAML that `--config` reads back to the same values; sections become nested keys.
std::string settings_yaml(const SettingRows& rows);
/// One aligned line per key; a star marks values that differ from `defaults`.
std::string settings_table(const SettingRows& rows, const SettingRows& defaults);
/// Sorted "key=value" lines of all rows that must be equal on all ranks.
std::string settings_canonical(const SettingRows& rows);
/// The first line that differs, with both sides; empty if the texts are equal.
std::string first_difference(const std::string& canonical, const std::string& other);
/// The text of --help: every key with default, unit, limits and meaning.
std::string settings_help(const SettingRows& defaults);
/// The same as Markdown, one table per section (docs/configuration.md).
std::string settings_markdown(const SettingRows& defaults);

}  // namespace ddp
