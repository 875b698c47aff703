// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ops/grad_target.hpp"

namespace ddp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The sizes of all parts together, whose sizes may differ in the first dimension only.
std::vector<int64_t> joined_sizes(const std::vector<at::Tensor>& parts) {
  TORCH_CHECK(!parts.empty() && parts[0].dim() > 0, "joined_rows: there is nothing to join");
  auto sizes = parts[0].sizes().vec();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto& part = parts[i];
    TORCH_CHECK(
        part.dim() == parts[0].dim() && part.sizes().slice(1).equals(parts[0].sizes().slice(1)) &&
            part.scalar_type() == parts[0].scalar_type() && part.device() == parts[0].device(),
        "joined_rows: a part ", part.sizes(), " of ", part.scalar_type(), " on ", part.device(),
        " does not fit the first, ", parts[0].sizes(), " of ", parts[0].scalar_type(), " on ",
        parts[0].device());
    sizes[0] += part.size(0);
  }
  return sizes;
}

/// Whether the parts follow each other in one memory.
bool are_adjacent(const std::vector<at::Tensor>& parts) {
  const auto* next = static_cast<const char*>(parts[0].const_data_ptr());
  for (const auto& part : parts) {
    if (!part.is_contiguous() || part.const_data_ptr() != next ||
        !part.storage().is_alias_of(parts[0].storage())) {
      return false;
    }
    next += part.nbytes();
  }
  return true;
}

/// The parts' own memory if they are adjacent, else a copy; without gradient.
at::Tensor join(const std::vector<at::Tensor>& parts) {
  const auto sizes = joined_sizes(parts);
  if (!are_adjacent(parts)) {
    return at::cat(parts, 0);
  }
  // Not a view for autograd: a view of a parameter may not be written later, as optimizers do.
  return detail::alias_of(parts[0], sizes);
}

/// One version for all parts, for their joint memory is saved for backwards. It is the largest: a
/// graph that saved a part before still refuses it if it has changed.
void share_version(const std::vector<at::Tensor>& parts) {
  const auto has_version = [](const at::Tensor& part) {
    return part.unsafeGetTensorImpl()->version_counter().enabled();
  };
  if (!std::all_of(parts.begin(), parts.end(), has_version)) {
    return;  // made in inference mode, so no backward saves them
  }
  uint32_t largest = 0;
  for (const auto& part : parts) {
    largest = std::max(largest, static_cast<uint32_t>(part._version()));
  }
  // The first part's own, which graphs may have saved.
  c10::VariableVersion version = parts[0].unsafeGetTensorImpl()->version_counter();
  version.set_version(largest);
  for (const auto& part : parts) {
    part.unsafeGetTensorImpl()->set_version_counter(version);
  }
}

class JoinedRows : public torch::autograd::Function<JoinedRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& first, const at::Tensor& second,
                            const std::optional<at::Tensor>& third) {
    ctx->save_for_backward({first, second, third.value_or(at::Tensor())});
    ctx->set_materialize_grads(false);
    std::vector<at::Tensor> parts = {first.detach(), second.detach()};
    if (third) {
      parts.push_back(third->detach());
    }
    return join(parts);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto parts = ctx->get_saved_variables();
    variable_list grads(parts.size());
    if (!grad_outputs[0].defined()) {
      return grads;
    }
    int64_t row = 0;
    for (std::size_t i = 0; i < parts.size() && parts[i].defined(); ++i) {
      const int64_t rows = parts[i].size(0);
      const auto grad = grad_outputs[0].narrow(0, row, rows);
      row += rows;
      if (at::GradMode::is_enabled()) {  // create_graph=true
        grads[i] = grad;
        continue;
      }
      const auto target = detail::grad_target(parts[i], ctx->needs_input_grad(i));
      if (target.memory.defined()) {
        target.write(grad);
        grads[i] = target.result();
      }
    }
    return grads;
  }
};

}  // namespace

at::Tensor joined_rows(const std::vector<at::Tensor>& parts) {
  if (parts.size() == 1) {
    return parts[0];
  }
  const bool wants_grad = std::any_of(parts.begin(), parts.end(),
                                      [](const at::Tensor& part) { return part.requires_grad(); });
  if (!wants_grad || !at::GradMode::is_enabled()) {
    const at::NoGradGuard no_grad;
    return join(parts);
  }
  TORCH_CHECK(parts.size() <= 3, "joined_rows: at most three parts may have gradients, not ",
              parts.size());
  return JoinedRows::apply(parts[0], parts[1],
                           parts.size() == 3 ? std::optional(parts[2]) : std::nullopt);
}

void join_rows(const std::vector<at::Tensor>& parts) {
  // In inference mode the memory would never be trained.
  const c10::InferenceMode as_parts(parts.at(0).is_inference());
  const at::NoGradGuard no_grad;
  const auto sizes = joined_sizes(parts);
  if (are_adjacent(parts)) {
    share_version(parts);
    return;
  }
  const auto memory = at::empty(sizes, parts[0].options());
  int64_t row = 0;
  for (auto part : parts) {
    const auto inside = memory.narrow(0, row, part.size(0));
    inside.copy_(part);
    part.set_data(inside);
    row += part.size(0);
  }
  share_version(parts);
}

}  // namespace ddp::ops
