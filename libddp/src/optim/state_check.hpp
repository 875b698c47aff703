// SPDX-License-Identifier: Apache-2.0
// Checks a StateDict before anything is loaded from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <string>

#include "ddp/core/state_dict.hpp"

namespace ddp::detail {

/// Every method throws MismatchError naming the object and the first key that fails.
class StateCheck {
 public:
  StateCheck(const StateDict& state, std::string object)
      : state_(state), object_(std::move(object)) {}

  /// `key` must hold exactly `expected`.
  void value(const std::string& key, const StateValue& expected);
  /// `key` must hold a value of T, which is returned.
  template <typename T>
  T get(const std::string& key) {
    const auto entry = find_value(key);
    if (!std::holds_alternative<T>(entry)) {
      fail(key, "holds a value of another type");
    }
    return std::get<T>(entry);
  }
  /// All of `expected` must exist with these shapes, or none of it. Returns whether all exist. Of a
  /// divided tensor all parts must exist, unless this rank needs only some.
  bool all_or_none(const std::map<StateKey, at::Tensor>& expected, bool needs_all_parts = true);
  /// Every existing key must have been checked.
  void nothing_else() const;

 private:
  StateValue find_value(const std::string& key);
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;

  const StateDict& state_;
  std::string object_;
  std::set<StateKey> seen_tensors_;
  std::set<std::string> seen_values_;
};

}  // namespace ddp::detail
