// SPDX-License-Identifier: Apache-2.0
// An options struct describes its fields once, for YAML files, key=value overrides, --help,
// docs/configuration.md, the settings table, saved settings and the comparison across ranks.
//
//   struct TrainOptions { int64_t batch_size = 128; };
//   void describe_fields(TrainOptions& o, ddp::FieldVisitor& v) {
//     v.field({.name = "batch_size", .doc = "Samples per rank and step.", .min = 1}, o.batch_size);
//   }
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/describe.hpp"

namespace ddp {

/// One setting, as messages, --help and docs/configuration.md show it.
struct Field {
  std::string name;       ///< the key, snake_case
  std::string doc;        ///< one line
  std::string unit = "";  ///< for example "MiB", "ms"; empty for plain numbers
  double min = -std::numeric_limits<double>::infinity();  ///< smallest allowed number
  double max = std::numeric_limits<double>::infinity();   ///< largest allowed number
  std::vector<std::string> choices = {};                  ///< allowed strings; empty allows any
  bool may_differ = false;  ///< ranks may have different values (a rank, a local folder)
  bool common = false;      ///< also on the short page of --help
  bool in_loop = false;     ///< only a program's own loop can use it: hidden unless uses() names it
};

/// A number, or nothing if the library chooses it: written and read as "auto".
using NumberOrAuto = std::optional<double>;

/// A reader sets the fields that it visits, a writer prints them.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  /// Visits one setting: a reader checks the value that it sets. Throws SettingsError.
  virtual void field(const Field& field, bool& value) = 0;
  virtual void field(const Field& field, int64_t& value) = 0;
  virtual void field(const Field& field, double& value) = 0;
  virtual void field(const Field& field, NumberOrAuto& value) = 0;
  virtual void field(const Field& field, std::string& value) = 0;
  virtual void field(const Field& field, std::vector<int64_t>& value) = 0;
  virtual void field(const Field& field, std::vector<double>& value) = 0;
  virtual void field(const Field& field, std::vector<std::string>& value) = 0;
  void field(Field info, int& value);
  /// Written and read as a whole number of milliseconds; name the key "<something>_ms".
  void field(Field info, std::chrono::milliseconds& value);

  /// An enumeration, printed and parsed by the names in `names`.
  template <typename E>
  void field(Field info, E& value, const std::vector<std::pair<std::string, E>>& names) {
    detail::visit_by_name(*this, std::move(info), value, names);
  }
  template <typename T>
  void field(const Field&, T&) {
    detail::refuse_field_type<T>();
  }

  /// Nested options: their keys become "<name>.<key>".
  template <typename T>
  void section(const std::string& name, T& options) {
    enter_section(name);
    detail::describe(options, *this);
    leave_section();
  }

 protected:
  virtual void enter_section(const std::string& name) = 0;  ///< before the fields of a section
  virtual void leave_section() = 0;                         ///< after them
};

/// A program's own section, declared before settings are read. --help shows its keys. What uses()
/// returns has an empty name and no options.
struct Section {
  std::string name;                             ///< first part of its keys: "<name>.<key>"
  std::function<void(FieldVisitor&)> describe;  ///< visits the section's options (defaults first)
  std::vector<std::string> used_keys{};         ///< set by uses()
  std::string doc{};                            ///< one line for --help
};

/// Declares section `name` with the options of T, which has describe_fields().
template <typename T>
Section declare_section(std::string name, std::string doc = {}) {
  return {std::move(name),
          [options = T{}](FieldVisitor& visitor) mutable { detail::describe(options, visitor); },
          {},
          std::move(doc)};
}

/// Names library settings that the program's own code reads: fields ("train.grad_accum_steps") or
/// sections ("metrics"). Options passed to library objects need no name.
Section uses(std::vector<std::string> keys);

}  // namespace ddp
