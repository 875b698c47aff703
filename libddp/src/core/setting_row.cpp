// SPDX-License-Identifier: Apache-2.0
#include "core/setting_row.hpp"

#include <charconv>
#include <cmath>

#include "core/setting_text.hpp"

namespace ddp {
namespace detail {
namespace {

class RowLister final : public FieldVisitor {
 public:
  RowLister(const std::string& section, SettingRows& rows) : path_(section), rows_(rows) {}

  void field(const Field& field, bool& value) override {
    add(field, SettingRow::Type::Bool, {value ? "true" : "false"});
  }
  void field(const Field& field, int64_t& value) override {
    add(field, SettingRow::Type::Integer, {std::to_string(value)});
  }
  void field(const Field& field, double& value) override {
    add(field, SettingRow::Type::Number, {number_text(value)});
  }
  void field(const Field& field, NumberOrAuto& value) override {
    add(with_auto(field), SettingRow::Type::Number, {number_text(value)});
  }
  void field(const Field& field, std::string& value) override {
    add(field, SettingRow::Type::Text, {value});
  }
  void field(const Field& field, std::vector<int64_t>& value) override {
    std::vector<std::string> items;
    for (const int64_t item : value) {
      items.push_back(std::to_string(item));
    }
    add(field, SettingRow::Type::IntegerList, std::move(items));
  }
  void field(const Field& field, std::vector<double>& value) override {
    std::vector<std::string> items;
    for (const double item : value) {
      items.push_back(number_text(item));
    }
    add(field, SettingRow::Type::NumberList, std::move(items));
  }
  void field(const Field& field, std::vector<std::string>& value) override {
    add(field, SettingRow::Type::TextList, value);
  }

 protected:
  void enter_section(const std::string& name) override { path_.enter(name); }
  void leave_section() override { path_.leave(); }

 private:
  void add(const Field& field, SettingRow::Type type, std::vector<std::string> values) {
    rows_.push_back({path_.key(field.name), type, std::move(values), field});
  }

  SectionPath path_;
  SettingRows& rows_;
};

}  // namespace

void list_settings(const std::string& section, const std::function<void(FieldVisitor&)>& describe,
                   SettingRows& rows) {
  RowLister lister(section, rows);
  describe(lister);
}

std::string number_text(double value) {
  if (std::isinf(value)) {
    return value > 0 ? "inf" : "-inf";
  }
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end);
}

std::string number_text(const NumberOrAuto& value) {
  return value ? number_text(*value) : "auto";
}

// Prints 10000000 instead of 1e+07, which is easier to read as an integer limit.
std::string limit_text(double value) {
  constexpr double kPlain = 1e15;
  return value == std::floor(value) && std::abs(value) < kPlain
             ? std::to_string(static_cast<int64_t>(value))
             : number_text(value);
}

std::string allowed_range(const Field& field, const std::string& what) {
  const bool low = !std::isinf(field.min);
  const bool high = !std::isinf(field.max);
  if (low && high) {
    return concat(what, " from ", limit_text(field.min), " to ", limit_text(field.max));
  }
  if (low) {
    return concat(what, " >= ", limit_text(field.min));
  }
  return high ? concat(what, " <= ", limit_text(field.max)) : what;
}

std::string join(const std::vector<std::string>& items, const char* separator) {
  std::string text;
  for (const std::string& item : items) {
    text += (text.empty() ? "" : separator) + item;
  }
  return text;
}

}  // namespace detail

std::string SettingRow::text() const {
  return is_list() ? concat("[", detail::join(values, ", "), "]") : values.front();
}

std::string SettingRow::allowed() const {
  const std::string choices = detail::join(field.choices, ", ");
  // Int's own limits tell a reader nothing.
  Field shown = field;
  if (shown.max >= std::numeric_limits<int>::max()) {
    shown.max = std::numeric_limits<double>::infinity();
  }
  if (shown.min <= std::numeric_limits<int>::min()) {
    shown.min = -std::numeric_limits<double>::infinity();
  }
  switch (type) {
    case Type::Bool:
      return "true or false";
    case Type::Integer:
      return detail::allowed_range(shown, "integer");
    case Type::Number:
      return detail::allowed_range(shown, "number") +
             (choices.empty() ? "" : concat(", or ", choices));
    case Type::Text:
      return choices.empty() ? "string" : concat("one of ", choices);
    case Type::IntegerList:
      return concat("list, each ", detail::allowed_range(shown, "integer"));
    case Type::NumberList:
      return concat("list, each ", detail::allowed_range(shown, "number"));
    case Type::TextList:
      return choices.empty() ? "list of strings" : concat("list of ", choices);
  }
  return {};
}

}  // namespace ddp
