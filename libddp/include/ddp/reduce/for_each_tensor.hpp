// SPDX-License-Identifier: Apache-2.0
// How the tensors inside a forward's result are found. For a type of your own, write beside it
//
//   void for_each_tensor(const MyOutput& output, const std::function<void(const at::Tensor&)>&
//   visit);
//
// found by argument-dependent lookup. It is needed with find_unused_parameters or static_graph
// only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ddp {

using TensorVisitor = std::function<void(const at::Tensor&)>;

namespace detail {

template <typename T>
struct HasCustomForEachTensor {
  template <typename U>
  static auto test(int)
      -> decltype(for_each_tensor(std::declval<const U&>(), std::declval<const TensorVisitor&>()),
                  std::true_type{});
  template <typename>
  static std::false_type test(...);
  static constexpr bool value = decltype(test<T>(0))::value;
};

template <typename T>
struct IsTuple : std::false_type {};
template <typename... Ts>
struct IsTuple<std::tuple<Ts...>> : std::true_type {};
template <typename A, typename B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <typename T, typename = void>
struct IsRange : std::false_type {};
template <typename T>
struct IsRange<T, std::void_t<decltype(std::declval<const T&>().begin()),
                              decltype(std::declval<const T&>().end())>> : std::true_type {};

inline void visit_ivalue(const c10::IValue& value, const TensorVisitor& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
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
      visit_ivalue(entry.value(), visit);
    }
  }
}

/// Visits every tensor in `value`; returns false where the type is unknown.
template <typename T>
bool visit_tensors(const T& value, const TensorVisitor& visit) {
  if constexpr (HasCustomForEachTensor<T>::value) {
    for_each_tensor(value, visit);
    return true;
  } else if constexpr (std::is_base_of_v<at::TensorBase, T>) {
    visit(value);
    return true;
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    visit_ivalue(value, visit);
    return true;
  } else if constexpr (IsTuple<T>::value) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return (visit_tensors(std::get<I>(value), visit) && ... && true);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>{});
  } else if constexpr (IsOptional<T>::value) {
    return !value || visit_tensors(*value, visit);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    return true;
  } else if constexpr (IsRange<T>::value) {
    if constexpr (requires { typename T::mapped_type; }) {
      for (const auto& entry : value) {
        if (!visit_tensors(entry.second, visit)) {
          return false;
        }
      }
    } else {
      for (const auto& element : value) {
        if (!visit_tensors(element, visit)) {
          return false;
        }
      }
    }
    return true;
  } else {
    return false;
  }
}

}  // namespace detail
}  // namespace ddp
