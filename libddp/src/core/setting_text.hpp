// SPDX-License-Identifier: Apache-2.0
// Strings shared by the reader and the writers of settings.
#pragma once

#include <string>
#include <vector>

#include "ddp/core/fields.hpp"

namespace ddp::detail {

/// A visitor's dotted path in nested sections.
class SectionPath {
 public:
  explicit SectionPath(const std::string& section) : parts_{section} {}
  void enter(const std::string& name) { parts_.push_back(name); }
  void leave() { parts_.pop_back(); }
  std::string key(const std::string& name) const {
    std::string key;
    for (const std::string& part : parts_) {
      key += part + ".";
    }
    return key + name;
  }

 private:
  std::vector<std::string> parts_;
};

/// Returns "ddp" for "ddp.bucket_cap_mb". A key without a section is its own section.
inline std::string section_of(const std::string& key) {
  return key.substr(0, key.find('.'));
}

/// The shortest string that parses to the same number.
std::string number_text(double value);
std::string number_text(const NumberOrAuto& value);
/// The field of a NumberOrAuto, with "auto" as its only shown and suggested choice.
inline Field with_auto(Field field) {
  field.choices = {"auto"};
  return field;
}
/// "<what> from 1 to 8", "<what> of at least 1" or just "<what>".
std::string allowed_range(const Field& field, const std::string& what);
std::string join(const std::vector<std::string>& items, const char* separator);

/// The candidate nearest to `word` by edits (insert, delete, change, swap). Empty if the nearest
/// needs more than 2 edits, or at least half the length of `word`.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ddp::detail
