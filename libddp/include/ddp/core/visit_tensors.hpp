// SPDX-License-Identifier: Apache-2.0
// How the library finds the tensors in a value: the result of a forward, a loader's batch, the
// batch and the result of a captured step. Supported: tensors, numbers, strings and IValues, and
// optionals, pairs, tuples, arrays, ranges and maps of them. For your own type, define next to it
//
//   void for_each_tensor(MyBatch& batch, const ddp::TensorVisitor& visit) {
//     visit(batch.images);
//     visit(batch.num_targets);  // only where a GraphedStep's lambda reads it
//   }
//
// It is found by argument-dependent lookup.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <bit>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace ddp {

/// Called by a type's for_each_tensor() with each tensor. The library may replace a visited tensor
/// with a copy on the device or one without its autograd graph.
class TensorVisitor {
 public:
  explicit TensorVisitor(std::function<void(at::Tensor&)> on_tensor,
                         std::function<void(int64_t)> on_number = nullptr)
      : on_tensor_(std::move(on_tensor)), on_number_(std::move(on_number)) {}

  void operator()(at::Tensor& tensor) const { on_tensor_(tensor); }

  /// Numbers and strings are part of a batch's kind: a GraphedStep captures one graph per value.
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void operator()(T number) const {
    if (!wants_numbers()) {
      return;
    }
    if constexpr (std::is_floating_point_v<T>) {
      on_number_(std::bit_cast<int64_t>(static_cast<double>(number)));
    } else {
      on_number_(static_cast<int64_t>(number));
    }
  }
  void operator()(const std::string& text) const {
    if (wants_numbers()) {
      on_number_(static_cast<int64_t>(std::hash<std::string_view>()(text)));
    }
  }
  bool wants_numbers() const { return on_number_ != nullptr; }

 private:
  std::function<void(at::Tensor&)> on_tensor_;
  std::function<void(int64_t)> on_number_;
};

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
    static_assert(!HasForEachNumber<Value>,
                  "for_each_number() is gone: call visit() with the numbers in for_each_tensor()");
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
