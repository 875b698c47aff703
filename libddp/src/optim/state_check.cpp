// SPDX-License-Identifier: Apache-2.0
#include "optim/state_check.hpp"

#include "ddp/core/error.hpp"

namespace ddp::detail {

StateValue StateCheck::find_value(const std::string& key) {
  const auto found = state_.values.find(key);
  if (found == state_.values.end()) {
    fail(key, "is missing");
  }
  seen_values_.insert(key);
  return found->second;
}

void StateCheck::value(const std::string& key, const StateValue& expected) {
  if (find_value(key) != expected) {
    const auto* saved = std::get_if<std::string>(&state_.values.at(key));
    const auto* here = std::get_if<std::string>(&expected);
    fail(key, concat("is \"", saved ? *saved : "?", "\", here \"", here ? *here : "?", "\""));
  }
}

bool StateCheck::all_or_none(const std::map<StateKey, at::Tensor>& expected, bool needs_all_parts) {
  size_t found = 0;
  const StateKey* missing = nullptr;
  for (const auto& [key, tensor] : expected) {
    if (!state_.contains(key)) {
      missing = missing ? missing : &key;
      continue;
    }
    ++found;
    seen_tensors_.insert(key);
    if (state_.sizes(key) != tensor.sizes()) {
      fail(key.text(), concat("has shape ", state_.sizes(key), ", here ", tensor.sizes()));
    }
    if (needs_all_parts) {
      state_.require_all_parts(key);
    }
  }
  if (found != 0 && missing) {
    fail(missing->text(), "is missing");
  }
  return found != 0;
}

void StateCheck::nothing_else() const {
  const auto require_seen = [this](const auto& entries) {
    for (const auto& [key, entry] : entries) {
      if (!seen_tensors_.contains(key)) {
        fail(key.text(), "is unexpected");
      }
    }
  };
  require_seen(state_.tensors);
  require_seen(state_.parts);
  for (const auto& [key, entry] : state_.values) {
    if (!seen_values_.contains(key)) {
      fail(key, "is unexpected");
    }
  }
}

void StateCheck::fail(const std::string& key, const std::string& what) const {
  throw MismatchError(concat("state of ", object_, ": ", key, " ", what,
                             "; it was saved by another model or with other settings"));
}

}  // namespace ddp::detail
