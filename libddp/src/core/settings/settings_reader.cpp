// SPDX-License-Identifier: Apache-2.0
#include "core/settings/settings_reader.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using UserValue = Settings::UserValue;

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

std::string shown_value(const UserValue& given) {
  if (given.is_null) {
    return "(nothing)";
  }
  const std::string text =
      given.is_list ? concat("[", join(given.items, ", "), "]") : given.items.front();
  const std::string cut = text.size() > 80 ? text.substr(0, 80) + "…" : text;
  return given.is_quoted ? concat("\"", cut, "\"") : cut;
}

[[noreturn]] void fail(const SettingRow& row, const UserValue& given, const std::string& item) {
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

class FieldReader final : public SectionVisitor<FieldReader> {
 public:
  FieldReader(const std::string& section, std::map<std::string, UserValue>& given,
              std::vector<std::string>& known_keys)
      : SectionVisitor(section), user_values_(given), known_keys_(known_keys) {}

  template <typename T>
  void visit(const Field& field, T& value) {
    const auto row = make_row(field, value);
    known_keys_.push_back(row.key);
    const auto found = user_values_.find(row.key);
    if (found != user_values_.end()) {
      found->second.was_read = true;
      read(row, found->second, value);
    }
  }

 private:
  template <typename T>
  void read(const SettingRow& row, const UserValue& given, T& value) {
    const bool wants_text = std::is_same_v<T, std::string>;
    if (given.is_list || given.is_null || (given.is_quoted && !wants_text) ||
        !accept(row.field, given.items.front(), value)) {
      fail(row, given, given.items.empty() ? "" : given.items.front());
    }
  }
  template <typename T>
  void read(const SettingRow& row, const UserValue& given, std::vector<T>& value) {
    if (given.is_null || (!given.is_list && !given.from_override)) {
      fail(row, given, "");
    }
    std::vector<T> read;
    for (const auto& item : given.is_list ? given.items : split_list(given.items.front())) {
      T parsed{};
      if (!accept(row.field, item, parsed)) {
        fail(row, given, item);
      }
      read.push_back(std::move(parsed));
    }
    value = std::move(read);
  }

  std::map<std::string, UserValue>& user_values_;
  std::vector<std::string>& known_keys_;
};

}  // namespace

void read_fields(const std::string& section, const std::function<void(FieldVisitor&)>& describe,
                 std::map<std::string, UserValue>& given, std::vector<std::string>& known_keys) {
  FieldReader reader(section, given, known_keys);
  describe(reader);
}

}  // namespace ddp::detail
