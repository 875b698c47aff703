// SPDX-License-Identifier: Apache-2.0
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

/// See core/visit_tensors.hpp.
class TensorVisitor {
 public:
  explicit TensorVisitor(std::function<void(at::Tensor&)> on_tensor,
                         std::function<void(int64_t)> on_number = nullptr)
      : on_tensor_(std::move(on_tensor)), on_number_(std::move(on_number)) {}

  void operator()(at::Tensor& tensor) const { on_tensor_(tensor); }

  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void operator()(T number) const {
    if constexpr (std::is_floating_point_v<T>) {
      operator()(std::bit_cast<int64_t>(static_cast<double>(number)));
    } else if (wants_numbers()) {
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
