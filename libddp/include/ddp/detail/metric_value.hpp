// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <optional>
#include <utility>

#include "ddp/detail/describe.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

/// A one-element tensor, a number that a GraphedStep logged, or a number. A default value is not
/// logged.
struct MetricValue {
  MetricValue() = default;
  MetricValue(at::Tensor one_element)  // NOLINT(google-explicit-constructor)
      : tensor(std::move(one_element)) {}
  MetricValue(LoggedScalar scalar)  // NOLINT(google-explicit-constructor)
      : logged(std::move(scalar)) {}
  MetricValue(double value) : number(value) {}  // NOLINT(google-explicit-constructor)
  MetricValue(const at::Scalar& item)           // NOLINT(google-explicit-constructor)
      : number(item.toDouble()) {}
  template <typename T>
  requires(!std::convertible_to<T, double> && !std::convertible_to<T, at::Tensor>)
      MetricValue(const T&) {  // NOLINT(google-explicit-constructor)
    static_assert(detail::always_false<T>,
                  "a metric is a number, a one-element tensor, or a number of a GraphedStep's log");
  }

  at::Tensor tensor = {};  ///< may require grad
  LoggedScalar logged = {};
  std::optional<double> number = {};
};

}  // namespace ddp
