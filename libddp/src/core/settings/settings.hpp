// SPDX-License-Identifier: Apache-2.0
// User settings from a YAML file and key=value overrides, and their conversion to options structs.
//
//   ddp::Settings settings;
//   settings.add_yaml_file("run.yaml");
//   settings.add_override("train.batch_size=128");
//   TrainOptions train;
//   settings.read("train", train);  // checks types, limits and unknown keys under "train."
//   settings.require_all_read();    // refuses keys that were not read
//
// All errors are SettingsError and name the file and line (or the argument), the key, the value,
// the allowed values and the fix.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/settings/setting_row.hpp"
#include "ddp/core/fields.hpp"

namespace ddp {

class Settings {
 public:
  /// Accepts one document of at most 1 MiB and 32 levels. Refuses aliases, anchors, tags and
  /// repeated keys or sections. Keys have at most 250 bytes and 32 levels, overrides' keys too.
  void add_yaml_file(const std::string& path);
  /// Messages show `name` as the file.
  void add_yaml(const std::string& text, const std::string& name);
  /// Adds the values of `rows` from list_settings(). Messages show `name` as the file.
  void add_rows(const SettingRows& rows, const std::string& name);
  /// `argument` is "key=value". The value is used verbatim; lists are "a,b" or "[a, b]". Later
  /// overrides win, and overrides win over the file in any order of calls.
  void add_override(const std::string& argument);

  /// Messages about unknown keys also suggest those of `rows`, which are read later.
  void suggest(const SettingRows& rows);

  /// Fills `options` from the keys under "<section>." and refuses unknown keys there.
  template <typename T>
  void read(const std::string& section, T& options) {
    read_section(section, [&](FieldVisitor& visitor) { describe_fields(options, visitor); });
  }
  void read_section(const std::string& section, const std::function<void(FieldVisitor&)>& describe);

  /// Refuses every key that was not read.
  void require_all_read() const;

  /// Whether the user set `key`, where ("run.yaml:12", "argument"), and whether by an override.
  bool has(const std::string& key) const { return user_values_.count(key) != 0; }
  std::string origin(const std::string& key) const { return user_values_.at(key).origin; }
  bool is_override(const std::string& key) const {
    return has(key) && user_values_.at(key).from_override;
  }
  /// Returns the keys that were not read yet. Types are guessed from the values.
  SettingRows unread_rows() const;

  /// One value as the user wrote it.
  struct UserValue {
    std::vector<std::string> items;  ///< one string, or the items of a YAML list
    bool is_list = false;
    bool is_null = false;    ///< "key:" without a value
    bool is_quoted = false;  ///< "128" in quotes is a string, not a number
    std::string origin;      ///< "run.yaml:12" or "argument"
    bool from_override = false;
    bool was_read = false;
  };

 private:
  [[noreturn]] void fail_unknown(const std::string& key) const;
  std::string similar_keys(const std::string& key) const;
  void check_key(const std::string& key, const UserValue& given) const;
  void set(const std::string& key, UserValue given);

  std::map<std::string, UserValue> user_values_;
  std::vector<std::string> known_keys_;
  std::vector<std::string> known_sections_;
  std::vector<std::string> suggested_keys_;
};

}  // namespace ddp
