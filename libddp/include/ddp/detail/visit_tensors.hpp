// SPDX-License-Identifier: Apache-2.0
// Finds the tensors in a value by its type: the implementation of core/visit_tensors.hpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ddp/core/visit_tensors.hpp"

namespace ddp {

namespace detail {

/// The fix shown in messages about an unknown type.
inline constexpr const char* kDefineForEachTensor =
    "define for_each_tensor(T&, const ddp::TensorVisitor&) beside the type";

template <typename T>
concept HasForEachTensor = requires(T& value, const TensorVisitor& visit) {
  for_each_tensor(value, visit);
};

template <typename T>
concept HasForEachNumber = requires(T& value, const std::function<void(double)>& visit) {
  for_each_number(value, visit);
};

template <typename T>
concept IsTupleLike = requires {
  std::tuple_size<T>::value;
};

template <typename T>
concept IsRange = requires(T& value) {
  value.begin();
  value.end();
  typename T::value_type;
  requires !std::is_same_v<typename T::value_type, T>;
};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <typename T>
inline constexpr bool is_number_or_text =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string>;

inline void visit_ivalue(const c10::IValue& value, const TensorVisitor& visit) {
  if (value.isTensor()) {
    visit(const_cast<at::Tensor&>(value.toTensor()));
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      visit_ivalue(element, visit);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      visit_ivalue(element, visit);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      visit_ivalue(entry.key(), visit);
      visit_ivalue(entry.value(), visit);
    }
  } else if (value.isInt()) {
    visit(value.toInt());
  } else if (value.isDouble()) {
    visit(value.toDouble());
  } else if (value.isBool()) {
    visit(value.toBool());
  } else if (value.isString()) {
    visit(value.toStringRef());
  }
}

/// Whether visit_tensors() knows a type, and all types in it.
template <typename T>
constexpr bool knows_tensors() {
  using Value = std::remove_cv_t<T>;
  if constexpr (HasForEachTensor<Value> || std::is_base_of_v<at::Tensor, Value> ||
                is_number_or_text<Value> || std::is_same_v<Value, c10::IValue>) {
    return true;
  } else if constexpr (IsOptional<Value>::value) {
    return knows_tensors<typename Value::value_type>();
  } else if constexpr (IsTupleLike<Value>) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (knows_tensors<std::tuple_element_t<I, Value>>() && ... && true);
    }
    (std::make_index_sequence<std::tuple_size_v<Value>>());
  } else if constexpr (requires { typename Value::mapped_type; }) {
    return IsRange<Value> && knows_tensors<typename Value::mapped_type>();
  } else if constexpr (IsRange<Value>) {
    return knows_tensors<typename Value::value_type>();
  } else {
    return false;
  }
}

template <typename T>
bool visit_tensors(T& value, const TensorVisitor& visit);

template <typename T>
void visit_range(T& range, const TensorVisitor& visit) {
  using Element = typename T::value_type;
  if constexpr (requires { range.size(); }) {
    visit(static_cast<int64_t>(range.size()));
  }
  if constexpr (std::is_arithmetic_v<Element>) {
    if (visit.wants_numbers()) {
      for (const Element element : range) {
        visit(element);
      }
    }
  } else {
    for (auto&& element : range) {
      if constexpr (requires { typename T::mapped_type; }) {
        if constexpr (is_number_or_text<typename T::key_type>) {
          visit(element.first);
        }
        visit_tensors(element.second, visit);
      } else {
        visit_tensors(element, visit);
      }
    }
  }
}

/// Visits every tensor, number and string in `value` in a fixed order. Returns knows_tensors<T>(),
/// and visits nothing if that is false. If `value` is const, `visit` must change nothing.
template <typename T>
bool visit_tensors(T& value, const TensorVisitor& visit) {
  using Value = std::remove_const_t<T>;
  [[maybe_unused]] auto& found = const_cast<Value&>(value);
  if constexpr (!knows_tensors<Value>()) {
    return false;
  } else if constexpr (HasForEachTensor<Value>) {
    static_assert(
        !HasForEachNumber<Value>,
        "for_each_number() is not called: pass the numbers to visit() in for_each_tensor()");
    for_each_tensor(found, visit);
  } else if constexpr (std::is_base_of_v<at::Tensor, Value> || is_number_or_text<Value>) {
    visit(found);
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    visit_ivalue(found, visit);
  } else if constexpr (IsOptional<Value>::value) {
    visit(found.has_value());
    if (found) {
      visit_tensors(*found, visit);
    }
  } else if constexpr (IsTupleLike<Value>) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, visit), ...); }, found);
  } else {
    visit_range(found, visit);
  }
  return true;
}

}  // namespace detail
}  // namespace ddp
