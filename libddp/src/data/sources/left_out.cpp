// SPDX-License-Identifier: Apache-2.0
#include "data/sources/left_out.hpp"

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

void LeftOut::add(const std::string& kind, const std::string& name, bool may_hold_samples) {
  constexpr size_t kShownNames = 3;
  may_miss_samples_ = may_miss_samples_ || may_hold_samples;
  Kind& entry = kinds_[kind];
  ++entry.count;
  if (entry.first_names.size() < kShownNames) {
    entry.first_names.push_back(name);
  }
}

void LeftOut::log(const std::string& where) const {
  std::string text;
  for (const auto& [kind, entry] : kinds_) {
    text += concat(text.empty() ? "" : ", ", entry.count, ' ', kind, " (");
    for (const std::string& name : entry.first_names) {
      text += (&name == &entry.first_names.front() ? "" : ", ") + name;
    }
    text += entry.count > std::ssize(entry.first_names) ? ", …)" : ")";
  }
  if (!text.empty()) {
    ddp::log(may_miss_samples_ ? LogLevel::Warning : LogLevel::Info,
             concat(where, " leaves out: ", text));
  }
}

}  // namespace ddp::detail
