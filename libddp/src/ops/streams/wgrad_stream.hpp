// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <optional>
#include <vector>

namespace ddp::ops::detail {

/// A parameter's gradient in a backward, launched after the input's gradient and run concurrently
/// with it. The rest of the backward waits for the input's gradient, so that one is launched first
/// and finds the multiprocessors free.
class WeightGradient {
 public:
  /// Construct before the op enqueues work: the gradient waits only for work already on the current
  /// stream. `limit` is WgradBranch::current_limit() at the op's forward.
  WeightGradient(const at::Tensor& parameter, int64_t limit);

  /// Runs `write`, which computes the gradient from `inputs` and writes it to
  /// grad_target(parameter). Uses the side stream if `limit` is not 0 and the parameter has a slot,
  /// else the current stream. Returns the result of `write`.
  at::Tensor make(const std::vector<at::Tensor>& inputs,
                  const std::function<at::Tensor()>& write) const;

 private:
  c10::Device device_;
  int64_t limit_;
  std::optional<c10::Event> ready_;  // of the inputs; none: on the current stream
};

}  // namespace ddp::ops::detail
