// SPDX-License-Identifier: Apache-2.0
#include "core/settings_reader.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "core/parse_number.hpp"
#include "core/setting_row.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Given = Settings::Given;

std::optional<bool> parse_bool(const std::string& text) {
  for (const char* word : {"true", "yes", "on"}) {
    if (text == word) {
      return true;
    }
  }
  for (const char* word : {"false", "no", "off"}) {
    if (text == word) {
      return false;
    }
  }
  return std::nullopt;
}

std::optional<double> parse_double(const std::string& text) {
  if (text == ".inf" || text == "-.inf") {  // YAML's own spelling
    return text.front() == '-' ? -INFINITY : INFINITY;
  }
  const auto value = parse_number<double>(text);
  return value && std::isnan(*value) ? std::nullopt : value;
}

bool in_range(const Field& field, double value) {
  return value >= field.min && value <= field.max;
}

// Whether `text` is a value of this type within the field's limits.
bool accept(const Field&, const std::string& text, bool& value) {
  const auto parsed = parse_bool(text);
  value = parsed.value_or(value);
  return parsed.has_value();
}
bool accept(const Field& field, const std::string& text, int64_t& value) {
  const auto parsed = parse_number<int64_t>(text);
  if (!parsed || !in_range(field, static_cast<double>(*parsed))) {
    return false;
  }
  value = *parsed;
  return true;
}
bool accept(const Field& field, const std::string& text, double& value) {
  const auto parsed = parse_double(text);
  if (!parsed || !in_range(field, *parsed)) {
    return false;
  }
  value = *parsed;
  return true;
}
bool accept(const Field& field, const std::string& text, NumberOrAuto& value) {
  if (text == "auto") {
    value.reset();
    return true;
  }
  double number = 0;
  const bool accepted = accept(field, text, number);
  value = accepted ? number : value;
  return accepted;
}
bool accept(const Field& field, const std::string& text, std::string& value) {
  if (!field.choices.empty() &&
      std::find(field.choices.begin(), field.choices.end(), text) == field.choices.end()) {
    return false;
  }
  value = text;
  return true;
}

std::string trim(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \t");
  return first == std::string::npos ? ""
                                    : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// "a, b" or "[a, b]"; "" and "[]" are the empty list.
std::vector<std::string> split_list(const std::string& text) {
  std::string inside = trim(text);
  if (inside.size() >= 2 && inside.front() == '[' && inside.back() == ']') {
    inside = trim(inside.substr(1, inside.size() - 2));
  }
  std::vector<std::string> items;
  while (!inside.empty()) {
    const std::size_t comma = inside.find(',');
    items.push_back(trim(inside.substr(0, comma)));
    if (comma == std::string::npos) {
      break;
    }
    inside = inside.substr(comma + 1);
    if (inside.empty()) {
      items.emplace_back();  // "a," has an empty last item, which numeric lists refuse
    }
  }
  return items;
}

std::string shown_value(const Given& given) {
  if (given.is_null) {
    return "(nothing)";
  }
  const std::string text =
      given.is_list ? concat("[", join(given.items, ", "), "]") : given.items.front();
  const std::string cut = text.size() > 80 ? text.substr(0, 80) + "…" : text;
  return given.is_quoted ? concat("\"", cut, "\"") : cut;
}

[[noreturn]] void fail(const SettingRow& row, const Given& given, const std::string& item) {
  std::string message =
      concat(given.origin, ": ", row.key, "=", shown_value(given), ": expected ", row.allowed());
  if (!row.field.unit.empty()) {
    message += concat(" (", row.field.unit, ")");
  }
  const std::string near = nearest(item, row.field.choices);
  message += "; fix: ";
  message += near.empty() ? concat("give such a value, for example the default ", row.key, "=",
                                   row.text().empty() ? "\"\"" : row.text())
                          : concat("did you mean ", row.key, "=", near, "?");
  if (row.is_list() && !given.is_list) {
    message += "; lists are written [a, b]";
  }
  throw SettingsError(message);
}

template <typename T>
std::string default_text(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return value;
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, NumberOrAuto>) {
    return number_text(value);
  } else {
    return std::to_string(value);
  }
}

}  // namespace

Given* SettingsReader::find(const Field& field) {
  const std::string key = path_.key(field.name);
  known_keys_.push_back(key);
  const auto found = given_.find(key);
  if (found == given_.end()) {
    return nullptr;
  }
  found->second.was_read = true;
  return &found->second;
}

template <typename T>
void SettingsReader::read_one(const Field& field, SettingRow::Type type, T& value) {
  const Given* given = find(field);
  if (given == nullptr) {
    return;
  }
  const bool wants_text = std::is_same_v<T, std::string>;
  if (given->is_list || given->is_null || (given->is_quoted && !wants_text) ||
      !accept(field, given->items.front(), value)) {
    fail({path_.key(field.name), type, {default_text(value)}, field}, *given,
         given->items.empty() ? "" : given->items.front());
  }
}

template <typename T>
void SettingsReader::read_list(const Field& field, SettingRow::Type type, std::vector<T>& value) {
  const Given* given = find(field);
  if (given == nullptr) {
    return;
  }
  SettingRow row{path_.key(field.name), type, {}, field};
  for (const T& item : value) {
    row.values.push_back(default_text(item));
  }
  if (given->is_null || (!given->is_list && !given->from_override)) {
    fail(row, *given, "");
  }
  std::vector<T> read;
  for (const std::string& item : given->is_list ? given->items : split_list(given->items.front())) {
    T parsed{};
    if (!accept(field, item, parsed)) {
      fail(row, *given, item);
    }
    read.push_back(std::move(parsed));
  }
  value = std::move(read);
}

void SettingsReader::field(const Field& field, bool& value) {
  read_one(field, SettingRow::Type::Bool, value);
}
void SettingsReader::field(const Field& field, int64_t& value) {
  read_one(field, SettingRow::Type::Integer, value);
}
void SettingsReader::field(const Field& field, double& value) {
  read_one(field, SettingRow::Type::Number, value);
}
void SettingsReader::field(const Field& field, NumberOrAuto& value) {
  read_one(with_auto(field), SettingRow::Type::Number, value);
}
void SettingsReader::field(const Field& field, std::string& value) {
  read_one(field, SettingRow::Type::Text, value);
}
void SettingsReader::field(const Field& field, std::vector<int64_t>& value) {
  read_list(field, SettingRow::Type::IntegerList, value);
}
void SettingsReader::field(const Field& field, std::vector<double>& value) {
  read_list(field, SettingRow::Type::NumberList, value);
}
void SettingsReader::field(const Field& field, std::vector<std::string>& value) {
  read_list(field, SettingRow::Type::TextList, value);
}

}  // namespace ddp::detail
