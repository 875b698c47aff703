// SPDX-License-Identifier: Apache-2.0
// The keys of options structs as rows, and all text printed from these rows.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
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
  std::string section_doc = {};  ///< the line of its section in --help

  bool is_list() const { return type >= Type::IntegerList; }
  /// The value as written after "key=": "128", "true", "[1, 2]".
  std::string text() const;
  /// The allowed values: "integer >= 1", "one of bf16, fp16, off".
  std::string allowed() const;
};

using SettingRows = std::vector<SettingRow>;

/// YAML with nested sections that `--config` reads back. Throws SettingsError above 1 MiB.
std::string settings_yaml(const SettingRows& rows);
/// One aligned line per key; a star marks values that differ from `defaults`.
std::string settings_table(const SettingRows& rows, const SettingRows& defaults);
/// One aligned line per key.
std::string settings_lines(const SettingRows& rows);
/// The rows whose values differ from those of `defaults`.
SettingRows changed_settings(const SettingRows& rows, const SettingRows& defaults);
/// Sorted "key=value" lines of all rows that must be equal on all ranks.
std::string settings_canonical(const SettingRows& rows);
/// The first line that differs, in both texts; nothing if the texts are equal.
std::optional<std::pair<std::string, std::string>> first_different_lines(const std::string& text,
                                                                         const std::string& other);
/// The same as "<line> here, <line> there"; empty if the texts are equal.
std::string first_difference(const std::string& canonical, const std::string& other);
/// All keys with default, unit, limits and meaning as Markdown, one table per section
/// (docs/configuration.md).
std::string settings_markdown(const SettingRows& defaults);

namespace detail {

/// Returns "ddp" for "ddp.bucket_cap_mb". A key without a section is its own section.
inline std::string section_of(const std::string& key) {
  return key.substr(0, key.find('.'));
}

std::string join(const std::vector<std::string>& items, const char* separator);

/// The candidate nearest to `word` by edits (insert, delete, change, swap), whatever their case.
/// Empty if the nearest needs more than 2 edits, or at least half the length of `word`.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

/// Whether an earlier version had this setting. A file that still sets it gets an error with its
/// name.
bool is_removed_setting(const std::string& key);

inline std::string value_text(bool value) {
  return value ? "true" : "false";
}
inline std::string value_text(int64_t value) {
  return std::to_string(value);
}
/// The shortest string that parses to the same number.
std::string value_text(double value);
inline std::string value_text(const NumberOrAuto& value) {
  return value ? value_text(*value) : "auto";
}
inline std::string value_text(const std::string& value) {
  return value;
}

template <typename T>
constexpr SettingRow::Type kSettingType =
    std::is_same_v<T, bool>          ? SettingRow::Type::Bool
    : std::is_same_v<T, int64_t>     ? SettingRow::Type::Integer
    : std::is_same_v<T, std::string> ? SettingRow::Type::Text
                                     : SettingRow::Type::Number;
template <typename T>
constexpr SettingRow::Type kSettingType<std::vector<T>> =
    std::is_same_v<T, int64_t>  ? SettingRow::Type::IntegerList
    : std::is_same_v<T, double> ? SettingRow::Type::NumberList
                                : SettingRow::Type::TextList;

/// Visits options whose keys start with a section. Derived::visit(field, value) receives the fields
/// of every type.
template <typename Derived>
class SectionVisitor : public FieldVisitor {
 public:
  explicit SectionVisitor(const std::string& section) : sections_{section} {}

  void field(const Field& field, bool& value) final { derived().visit(field, value); }
  void field(const Field& field, int64_t& value) final { derived().visit(field, value); }
  void field(const Field& field, double& value) final { derived().visit(field, value); }
  void field(const Field& field, NumberOrAuto& value) final { derived().visit(field, value); }
  void field(const Field& field, std::string& value) final { derived().visit(field, value); }
  void field(const Field& field, std::vector<int64_t>& value) final {
    derived().visit(field, value);
  }
  void field(const Field& field, std::vector<double>& value) final {
    derived().visit(field, value);
  }
  void field(const Field& field, std::vector<std::string>& value) final {
    derived().visit(field, value);
  }

 protected:
  template <typename T>
  SettingRow make_row(const Field& field, const T& value) const {
    SettingRow row{
        join(sections_, ".") + "." + field.name, kSettingType<T>, {value_text(value)}, field};
    if constexpr (std::is_same_v<T, NumberOrAuto>) {
      row.field.choices = {"auto"};
    }
    return row;
  }
  template <typename T>
  SettingRow make_row(const Field& field, const std::vector<T>& values) const {
    SettingRow row{
        join(sections_, ".") + "." + field.name, kSettingType<std::vector<T>>, {}, field};
    for (const T& value : values) {
      row.values.push_back(value_text(value));
    }
    return row;
  }

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }
  void enter_section(const std::string& name) final { sections_.push_back(name); }
  void leave_section() final { sections_.pop_back(); }

  std::vector<std::string> sections_;  // nested, from the outermost
};

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

}  // namespace ddp
