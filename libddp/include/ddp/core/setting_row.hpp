// SPDX-License-Identifier: Apache-2.0
// The keys of options structs as rows, and everything that is printed from them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"

namespace ddp {

/// One key with its present value.
struct SettingRow {
  enum class Type { Bool, Integer, Number, Text, IntegerList, NumberList, TextList };

  std::string key;  ///< with its section: "train.batch_size"
  Type type = Type::Text;
  std::vector<std::string> values;  ///< one text, or the items of a list
  Field field;

  bool is_list() const { return type >= Type::IntegerList; }
  /// As it is written after "key=": "128", "true", "[1, 2]".
  std::string text() const;
  /// What is allowed: "integer >= 1", "one of bf16, fp16, off".
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

/// A file that `--config` reads back to the same values; keys nested as sections.
std::string settings_yaml(const SettingRows& rows);
/// One line a key, aligned; values that are not in `defaults` are marked with a star.
std::string settings_table(const SettingRows& rows, const SettingRows& defaults);
/// Sorted "key=value" lines of all rows that must be equal on all ranks.
std::string settings_canonical(const SettingRows& rows);
/// The first line that differs, with both sides; empty where the texts are equal.
std::string first_difference(const std::string& canonical, const std::string& other);
/// What --help prints: every key with default, unit, limits and meaning.
std::string settings_help(const SettingRows& defaults);
/// The same as Markdown tables, one a section (docs/configuration.md).
std::string settings_markdown(const SettingRows& defaults);

}  // namespace ddp
