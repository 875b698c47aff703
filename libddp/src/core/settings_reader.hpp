// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/setting_row.hpp"
#include "core/setting_text.hpp"
#include "core/settings.hpp"

namespace ddp::detail {

/// Sets fields from the user's values and records the keys it saw.
class SettingsReader final : public FieldVisitor {
 public:
  SettingsReader(const std::string& section, std::map<std::string, Settings::Given>& given,
                 std::vector<std::string>& known_keys)
      : path_(section), given_(given), known_keys_(known_keys) {}

  void field(const Field& field, bool& value) override;
  void field(const Field& field, int64_t& value) override;
  void field(const Field& field, double& value) override;
  void field(const Field& field, NumberOrAuto& value) override;
  void field(const Field& field, std::string& value) override;
  void field(const Field& field, std::vector<int64_t>& value) override;
  void field(const Field& field, std::vector<double>& value) override;
  void field(const Field& field, std::vector<std::string>& value) override;

 protected:
  void enter_section(const std::string& name) override { path_.enter(name); }
  void leave_section() override { path_.leave(); }

 private:
  Settings::Given* find(const Field& field);
  template <typename T>
  void read_one(const Field& field, SettingRow::Type type, T& value);
  template <typename T>
  void read_list(const Field& field, SettingRow::Type type, std::vector<T>& value);

  SectionPath path_;
  std::map<std::string, Settings::Given>& given_;
  std::vector<std::string>& known_keys_;
};

}  // namespace ddp::detail
