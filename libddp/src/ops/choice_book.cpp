// SPDX-License-Identifier: Apache-2.0
#include "ops/choice_book.hpp"

namespace ddp::ops::detail {

// Never destroyed: a plan may be written late in the process.
ChoiceBook& ChoiceBook::instance() {
  static auto* book = new ChoiceBook;
  return *book;
}

std::optional<size_t> ChoiceBook::find(const std::string& what, size_t count) const {
  const std::lock_guard lock(mutex_);
  const auto found = choices_.find(what);
  if (found == choices_.end() || static_cast<size_t>(found->second.count) != count) {
    return std::nullopt;
  }
  return static_cast<size_t>(found->second.chosen);
}

void ChoiceBook::note(const std::string& what, size_t count, size_t chosen) {
  const std::lock_guard lock(mutex_);
  keep(what, {static_cast<int64_t>(count), static_cast<int64_t>(chosen)});
}

void ChoiceBook::keep(const std::string& what, const MeasuredChoice& choice) {
  if (choices_.size() < kMaxNoted || choices_.contains(what)) {
    choices_[what] = choice;
  }
}

MeasuredChoices ChoiceBook::all() const {
  const std::lock_guard lock(mutex_);
  return choices_;
}

void ChoiceBook::adopt(const MeasuredChoices& choices) {
  const std::lock_guard lock(mutex_);
  for (const auto& [what, choice] : choices) {
    keep(what, choice);
  }
}

}  // namespace ddp::ops::detail
