// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <optional>
#include <vector>

namespace ddp::ops::detail {

/// The gradient of a parameter inside a backward, made behind the input's gradient in the order of
/// launches and beside it on the device. The input's gradient is what the rest of the backward
/// waits for: launched first, its blocks find the multiprocessors free.
class WeightGradient {
 public:
  /// Before the op enqueues anything: the gradient waits for what is on the current stream now, and
  /// for no more. `limit` is WgradBranch::current_limit() at the op's forward.
  WeightGradient(const at::Tensor& parameter, int64_t limit);

  /// Runs `write`, which makes the gradient from `inputs` and writes it to grad_target(parameter):
  /// on the side stream where `limit` is not 0 and the parameter has a slot, else on the current
  /// stream. Returns what `write` returned.
  at::Tensor make(const std::vector<at::Tensor>& inputs,
                  const std::function<at::Tensor()>& write) const;

 private:
  c10::Device device_;
  int64_t limit_;
  std::optional<c10::Event> ready_;  // of the inputs; none: on the current stream
};

}  // namespace ddp::ops::detail
