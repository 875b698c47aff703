// SPDX-License-Identifier: Apache-2.0
// Ops that write gradients into grad slots on a CPU too. On GPUs more ops do.
#include "ops/shared/grad_slot.hpp"

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "support/catch.hpp"

namespace {

/// The first backward of `loss` overwrites the parameters' slots, the second adds to them.
void check_slots(const std::vector<torch::Tensor>& parameters,
                 const std::function<torch::Tensor()>& loss) {
  const auto wanted = torch::autograd::grad({loss()}, parameters);
  std::vector<ddp::ops::GradSlot> slots(parameters.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i].memory = torch::full_like(parameters[i].detach(), 7);
    ddp::ops::add_grad_slot(parameters[i], slots[i]);
  }
  for (int backward = 1; backward <= 2; ++backward) {
    loss().backward();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      CAPTURE(backward, i);
      CHECK(slots[i].written);
      CHECK_FALSE(parameters[i].grad().defined());
      CHECK(torch::allclose(slots[i].memory, backward * wanted[i]));
    }
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    ddp::ops::remove_grad_slot(parameters[i], slots[i]);
  }
}

torch::Tensor parameter(torch::IntArrayRef shape) {
  return torch::randn(shape).requires_grad_(true);
}

}  // namespace

TEST_CASE("the head's loss writes the gradients of weight and bias into grad slots") {
  torch::manual_seed(1);
  const auto hidden = torch::randn({7, 6}), weight = parameter({13, 6}), bias = parameter({13});
  const auto labels = torch::tensor({3, -100, 0, 12, 5, -100, 7}, torch::kLong);
  check_slots({weight, bias}, [&] {
    return ddp::ops::linear_cross_entropy(hidden, weight, labels, {.bias = bias}).loss_sum * 0.5;
  });
}

TEST_CASE("joined rows write each part's gradient into its grad slot") {
  torch::manual_seed(2);
  const auto first = parameter({3, 4}), second = parameter({2, 4});
  const auto factors = torch::randn({5, 4});
  check_slots({first, second}, [&] {
    return (ddp::ops::joined_rows({first, second}) * factors).sum();
  });
}
