// SPDX-License-Identifier: Apache-2.0
// Finds the tensors in a value by its type: the implementation of core/visit_tensors.hpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

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

template <typename T>
bool visit_tensors(T& value, const TensorVisitor& visit);

template <typename T>
bool visit_range(T& range, const TensorVisitor& visit) {
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
    return true;
  } else {
    for (auto&& element : range) {
      if constexpr (requires { typename T::mapped_type; }) {
        if constexpr (is_number_or_text<typename T::key_type>) {
          visit(element.first);
        }
        if (!visit_tensors(element.second, visit)) {
          return false;
        }
      } else if (!visit_tensors(element, visit)) {
        return false;
      }
    }
    return true;
  }
}

/// Visits every tensor, number and string in `value` in a fixed order. Returns false if a type is
/// unknown. If `value` is const, `visit` must change nothing.
template <typename T>
bool visit_tensors(T& value, const TensorVisitor& visit) {
  using Value = std::remove_const_t<T>;
  auto& found = const_cast<Value&>(value);
  if constexpr (HasForEachTensor<Value>) {
    static_assert(
        !HasForEachNumber<Value>,
        "for_each_number() is not called: pass the numbers to visit() in for_each_tensor()");
    for_each_tensor(found, visit);
    return true;
  } else if constexpr (std::is_base_of_v<at::Tensor, Value> || is_number_or_text<Value>) {
    visit(found);
    return true;
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    visit_ivalue(found, visit);
    return true;
  } else if constexpr (IsOptional<Value>::value) {
    visit(found.has_value());
    return !found || visit_tensors(*found, visit);
  } else if constexpr (IsTupleLike<Value>) {
    return std::apply(
        [&](auto&... elements) { return (visit_tensors(elements, visit) && ... && true); }, found);
  } else if constexpr (IsRange<Value>) {
    return visit_range(found, visit);
  } else {
    return false;
  }
}

}  // namespace detail
}  // namespace ddp
