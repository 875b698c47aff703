// SPDX-License-Identifier: Apache-2.0
#include "optim/state_check.hpp"

#include "ddp/core/error.hpp"

namespace ddp::detail {

StateValue StateCheck::find_value(const std::string& key) {
  const auto found = state_.values.find(key);
  if (found == state_.values.end()) {
    fail(key, "is missing");
  }
  seen_.insert(key);
  return found->second;
}

void StateCheck::value(const std::string& key, const StateValue& expected) {
  if (find_value(key) != expected) {
    const auto* saved = std::get_if<std::string>(&state_.values.at(key));
    const auto* here = std::get_if<std::string>(&expected);
    fail(key, concat("is \"", saved ? *saved : "?", "\", here \"", here ? *here : "?", "\""));
  }
}

bool StateCheck::all_or_none(const std::map<std::string, at::Tensor>& expected) {
  size_t found = 0;
  const std::string* missing = nullptr;
  for (const auto& [key, tensor] : expected) {
    const auto entry = state_.tensors.find(key);
    if (entry == state_.tensors.end()) {
      missing = missing ? missing : &key;
      continue;
    }
    ++found;
    seen_.insert(key);
    if (entry->second.sizes() != tensor.sizes()) {
      fail(key, concat("has shape ", entry->second.sizes(), ", here ", tensor.sizes()));
    }
  }
  if (found != 0 && missing) {
    fail(*missing, "is missing");
  }
  return found != 0;
}

void StateCheck::nothing_else() const {
  for (const auto& [key, tensor] : state_.tensors) {
    if (!seen_.contains(key)) {
      fail(key, "is unexpected");
    }
  }
  for (const auto& [key, entry] : state_.values) {
    if (!seen_.contains(key)) {
      fail(key, "is unexpected");
    }
  }
}

void StateCheck::fail(const std::string& key, const std::string& what) const {
  throw MismatchError(concat("state of ", object_, ": ", key, " ", what,
                             "; it was saved by another model or with other settings"));
}

}  // namespace ddp::detail
