// SPDX-License-Identifier: Apache-2.0
// Small texts shared by the reader and the writers of settings.
#pragma once

#include <string>
#include <vector>

#include "ddp/core/fields.hpp"

namespace ddp::detail {

/// The dotted place of a visitor in nested sections.
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

/// "ddp" of "ddp.bucket_cap_mb"; a key without a section is its own.
inline std::string section_of(const std::string& key) {
  return key.substr(0, key.find('.'));
}

/// The shortest text that reads back to the same number.
std::string number_text(double value);
std::string number_text(const NumberOrAuto& value);
/// The field of a NumberOrAuto: the word is shown and suggested as its only choice.
inline Field with_auto(Field field) {
  field.choices = {"auto"};
  return field;
}
/// "<what> from 1 to 8", "<what> of at least 1" or just "<what>".
std::string allowed_range(const Field& field, const std::string& what);
std::string join(const std::vector<std::string>& items, const char* separator);

/// The candidate nearest to `word` by edits (insert, delete, change, swap), or empty where none is
/// near enough to be meant: at most 2 edits, and fewer than half of the word.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ddp::detail
