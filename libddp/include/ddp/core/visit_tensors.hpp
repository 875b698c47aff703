// SPDX-License-Identifier: Apache-2.0
// How the library finds the tensors in batches and in results of forwards and captured steps.
// Supported: tensors, numbers, strings and IValues, and optionals, pairs, tuples, arrays, ranges
// and maps of them. For your own type, define next to it
//
//   void for_each_tensor(MyBatch& batch, const ddp::TensorVisitor& visit) {
//     visit(batch.images);
//     visit(batch.num_targets);  // only where a GraphedStep's lambda reads it
//   }
//
// It is found by argument-dependent lookup.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
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

  /// Numbers and strings are a batch's kind: a GraphedStep captures one graph per value.
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

}  // namespace ddp
