// SPDX-License-Identifier: Apache-2.0
#include "core/settings/settings.hpp"

#include <algorithm>
#include <iterator>

#include "core/files/file_ops.hpp"
#include "core/settings/parse_number.hpp"
#include "core/settings/setting_row.hpp"
#include "core/settings/settings_reader.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

std::string last_part(const std::string& key) {
  return key.substr(key.rfind('.') + 1);
}

// "steps" of "train.max_steps".
std::string last_word(const std::string& key) {
  return key.substr(key.find_last_of("._") + 1);
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_number(const std::string& text) {
  return text == ".inf" || text == "-.inf" || detail::parse_number<double>(text).has_value();
}

// Reads the whole file, or the limit plus one byte so that the caller detects excess.
std::string read_file(const std::string& path) {
  std::string why;
  auto text = detail::read_start(path, detail::kMaxYamlBytes + 1, why);
  if (!text) {
    throw SettingsError(
        concat("--config ", path, " cannot be read: ", why, "; fix: give the path of a YAML file"));
  }
  return *std::move(text);
}

}  // namespace

void Settings::add_rows(const SettingRows& rows, const std::string& name) {
  for (const SettingRow& row : rows) {
    UserValue given;
    given.items = row.values;
    given.is_list = row.is_list();
    given.origin = name;
    set(row.key, std::move(given));
  }
}

// Only such keys can be written as YAML with nested sections, and read again.
void Settings::check_key(const std::string& key, const UserValue& given) const {
  const auto refuse = [&](const std::string& why) {
    throw SettingsError(concat(given.origin, ": the key '", key.substr(0, 120), "' ", why));
  };
  if (key.starts_with('.') || key.ends_with('.') || key.find("..") != std::string::npos) {
    refuse("has an empty part; fix: write section.key");
  }
  if (key.size() > detail::kMaxKeyBytes) {
    refuse(concat("is longer than ", detail::kMaxKeyBytes, " bytes; fix: use shorter names"));
  }
  if (std::count(key.begin(), key.end(), '.') >= std::ptrdiff_t{detail::kMaxYamlDepth}) {
    refuse(
        concat("is nested deeper than ", detail::kMaxYamlDepth, " levels; fix: use fewer levels"));
  }
  const auto fail = [&](const std::string& value, const std::string& inner) {
    throw SettingsError(concat(given.origin, ": ", value.substr(0, 120), " has a value, but ",
                               inner.substr(0, 120), " is also set; fix: keep one of them"));
  };
  for (auto dot = key.find('.'); dot != std::string::npos; dot = key.find('.', dot + 1)) {
    const auto outer = user_values_.find(key.substr(0, dot));
    if (outer != user_values_.end() && !outer->second.is_null) {
      fail(outer->first, key);
    }
  }
  const auto inner = user_values_.lower_bound(key + ".");
  if (!given.is_null && inner != user_values_.end() && inner->first.starts_with(key + ".")) {
    fail(key, inner->first);
  }
}

void Settings::set(const std::string& key, UserValue given) {
  check_key(key, given);
  const auto found = user_values_.find(key);
  if (found == user_values_.end()) {
    user_values_.emplace(key, std::move(given));
  } else if (given.from_override || !found->second.from_override) {
    found->second = std::move(given);
  }
}

void Settings::add_yaml_file(const std::string& path) {
  add_yaml(read_file(path), path);
}

void Settings::add_yaml(const std::string& text, const std::string& name) {
  for (auto& [key, given] : detail::read_yaml(text, name)) {
    set(key, given);
  }
}

void Settings::add_override(const std::string& argument) {
  const std::size_t equals = argument.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw SettingsError(concat("argument '", argument.substr(0, 120),
                               "' is not key=value; fix: write for example train.batch_size=128"));
  }
  UserValue given;
  given.items = {argument.substr(equals + 1)};
  given.origin = "argument";
  given.from_override = true;
  set(argument.substr(0, equals), std::move(given));
}

void Settings::read_section(const std::string& section,
                            const std::function<void(FieldVisitor&)>& describe) {
  if (!contains(known_sections_, section)) {
    known_sections_.push_back(section);
  }
  detail::read_fields(section, describe, user_values_, known_keys_);
  for (auto& entry : user_values_) {
    const std::string& key = entry.first;  // Clang before 16 cannot capture a structured binding
    UserValue& given = entry.second;
    const bool empty_section =
        given.is_null &&
        std::any_of(known_keys_.begin(), known_keys_.end(), [&](const auto& known) {
          return known.compare(0, key.size() + 1, key + ".") == 0;
        });
    given.was_read = given.was_read || empty_section;
    if (detail::section_of(key) == section && !given.was_read) {
      fail_unknown(key);
    }
  }
}

SettingRows Settings::unread_rows() const {
  SettingRows rows;
  for (const auto& [key, given] : user_values_) {
    if (given.was_read || given.is_null) {
      continue;
    }
    using Type = SettingRow::Type;
    const bool is_word = given.is_quoted || given.is_list;
    const bool is_bool =
        !is_word && (given.items.front() == "true" || given.items.front() == "false");
    const bool as_number = !is_word && is_number(given.items.front());
    const Type type = given.is_list ? Type::TextList
                      : is_bool     ? Type::Bool
                      : as_number   ? Type::Number
                                    : Type::Text;
    rows.push_back({key, type, given.items, {.name = key, .doc = "read by the program"}});
  }
  return rows;
}

void Settings::require_all_read() const {
  for (const auto& [key, given] : user_values_) {
    if (!given.was_read) {
      fail_unknown(key);
    }
  }
}

void Settings::suggest(const SettingRows& rows) {
  for (const SettingRow& row : rows) {
    suggested_keys_.push_back(row.key);
  }
}

// Search order: a typo anywhere, a key without (or with another) section, then another name in the
// same section with the same last word.
std::string Settings::similar_keys(const std::string& key) const {
  constexpr std::size_t kMost = 3;
  std::vector<std::string> keys = known_keys_;
  for (const std::string& later : suggested_keys_) {
    if (!contains(keys, later)) {
      keys.push_back(later);
    }
  }
  if (const std::string near = detail::nearest(key, keys); !near.empty()) {
    return near;
  }
  const auto same_name = std::find_if(keys.begin(), keys.end(), [&](const std::string& known) {
    return last_part(known) == last_part(key);
  });
  if (same_name != keys.end()) {
    return *same_name;
  }
  std::vector<std::string> same_word;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(same_word),
               [&](const std::string& known) {
                 return detail::section_of(known) == detail::section_of(key) &&
                        last_word(known) == last_word(key);
               });
  return same_word.size() > kMost ? "" : detail::join(same_word, " or ");
}

void Settings::fail_unknown(const std::string& key) const {
  const UserValue& given = user_values_.at(key);
  if (detail::is_removed_setting(key)) {
    throw SettingsError(concat(given.origin, ": ", key, " was removed; delete it"));
  }
  std::string message = concat(given.origin, ": unknown setting '", key.substr(0, 120), "'");
  const std::string near = similar_keys(key);
  if (contains(known_sections_, key)) {
    message += concat("; '", key, "' is a section: set ", key, ".<key>=value");
  } else if (!near.empty()) {
    message += concat("; did you mean ", near, "?");
  } else if (!contains(known_sections_, detail::section_of(key)) &&
             key.find('.') != std::string::npos) {
    message += concat("; there is no section '", detail::section_of(key),
                      "' (sections: ", detail::join(known_sections_, ", "), ")");
  } else {
    message += "; --help all lists every key";
  }
  throw SettingsError(message);
}

}  // namespace ddp
