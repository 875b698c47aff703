// SPDX-License-Identifier: Apache-2.0
// The templates behind ddp::FieldVisitor, with a readable error for each unsuitable type.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddp {
class FieldVisitor;
}

namespace ddp::detail {

template <typename T>
inline constexpr bool always_false = false;

/// Calls the describe_fields of T's namespace.
template <typename T>
void describe(T& options, FieldVisitor& visitor) {
  if constexpr (requires { describe_fields(options, visitor); }) {
    describe_fields(options, visitor);
  } else {
    static_assert(always_false<T>,
                  "define void describe_fields(T&, ddp::FieldVisitor&) in the namespace of the "
                  "settings struct T");
  }
}

/// Visits an enumeration as a text, which must be one of `names`.
template <typename Visitor, typename FieldT, typename E>
void visit_by_name(Visitor& visitor, FieldT info, E& value,
                   const std::vector<std::pair<std::string, E>>& names) {
  std::string text;
  for (const auto& [name, enumerator] : names) {
    info.choices.push_back(name);
    text = enumerator == value ? name : text;
  }
  visitor.field(info, text);
  for (const auto& [name, enumerator] : names) {
    value = name == text ? enumerator : value;
  }
}

template <typename T>
void refuse_field_type() {
  static_assert(
      always_false<T>,
      "a setting is a bool, int, int64_t, double, std::string, std::chrono::milliseconds, "
      "ddp::NumberOrAuto, or a vector of int64_t, double or std::string; an enumeration "
      "needs names as third argument: {{\"name\", T::Value}, …}");
}

}  // namespace ddp::detail
