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
/// and finds the multiprocessors free. side_streams.hpp has a drawing.
class WeightGradient {
 public:
  /// Construct before the op enqueues work: the gradient waits only for work already on the current
  /// stream. `held_bytes_limit` is that function's result in the op's forward.
  WeightGradient(const at::Tensor& parameter, int64_t held_bytes_limit);

  /// Whether compute() uses a side stream: the limit is not 0 and the parameter has a grad slot.
  bool is_concurrent() const { return ready_.has_value(); }

  /// Runs `write`, which computes the gradient from `inputs` and writes it to
  /// grad_target(parameter). Returns the result of `write`. A parameter's hook that reads the slot
  /// must make its stream wait for GradSlot::stream; the end of the backward waits by itself.
  at::Tensor compute(const std::vector<at::Tensor>& inputs,
                     const std::function<at::Tensor()>& write) const;

 private:
  c10::Device device_;
  int64_t held_bytes_limit_;
  std::optional<c10::Event> ready_;  // of the inputs; nullopt: on the current stream
};

}  // namespace ddp::ops::detail
