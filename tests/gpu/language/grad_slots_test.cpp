// SPDX-License-Identifier: Apache-2.0
// Ops of language models that write the gradients of their parameters into grad slots, and add to
// them in the next backward. References are float64.
#include "ops/shared/grad_slot.hpp"

#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"
#include "support/partly_used_ops.hpp"

using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using torch::autograd::grad;

namespace {

using Tensors = std::vector<torch::Tensor>;
using Slots = std::vector<ddp::ops::GradSlot>;

/// Gives the parameters float32 slots for its lifetime.
class Slotted {
 public:
  explicit Slotted(Tensors parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      slots_.push_back({torch::zeros_like(parameter.detach(), torch::kFloat)});
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      ddp::ops::add_grad_slot(parameters_[i], slots_[i]);
    }
  }
  Slotted(const Slotted&) = delete;
  Slotted& operator=(const Slotted&) = delete;
  ~Slotted() {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      ddp::ops::remove_grad_slot(parameters_[i], slots_[i]);
    }
  }
  const Slots& slots() const { return slots_; }

 private:
  Tensors parameters_;
  Slots slots_;
};

/// Two backwards of `loss` leave twice the gradients of `reference` in the parameters' slots.
void check_slots(const Tensors& parameters, const std::function<torch::Tensor()>& loss,
                 const std::function<torch::Tensor(const Tensors&)>& reference) {
  Tensors copies;
  for (const auto& parameter : parameters) {
    copies.push_back(reference_of(parameter));
  }
  const auto wanted = grad({reference(copies)}, copies);
  const Slotted slotted(parameters);
  for (int backward = 1; backward <= 2; ++backward) {
    loss().backward();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      CAPTURE(backward, i);
      CHECK(slotted.slots()[i].written);
      CHECK_FALSE(parameters[i].grad().defined());
      CHECK(relative_error(slotted.slots()[i].memory, backward * wanted[i]) < 0.01);
    }
  }
}

torch::Tensor parameter(torch::IntArrayRef shape, double scale = 1) {
  return leaf(shape, torch::kBFloat16, scale);
}

/// With other factors for each column, in float32 or float64.
torch::Tensor weighted_sum(const torch::Tensor& y) {
  const auto dtype = y.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
  return (y.to(dtype) * torch::arange(y.size(-1), torch::kCUDA)).sum();
}

}  // namespace

TEST_CASE("linear and layer_norm write and add to grad slots") {
  torch::manual_seed(2);
  const auto x = parameter({100, 64});
  const Tensors all = {parameter({40, 64}, 0.125), parameter({40}), parameter({40}),
                       parameter({40})};
  check_slots(
      all,
      [&] {
        const auto y = ddp::ops::linear(x, all[0], {.bias = all[1]});
        return weighted_sum(ddp::ops::layer_norm(y, all[2], all[3], 1e-5).normed);
      },
      [&](const Tensors& p) {
        const auto y = torch::linear(x.to(torch::kDouble), p[0], p[1]);
        return weighted_sum(torch::layer_norm(y, {40}, p[2], p[3], 1e-5));
      });
}

TEST_CASE("gelu writes and adds its bias's gradient to a grad slot") {
  torch::manual_seed(3);
  const auto x = parameter({100, 64});
  const Tensors bias = {parameter({64})};
  check_slots(
      bias, [&] { return weighted_sum(ddp::ops::gelu(x, {.bias = bias[0]})); },
      [&](const Tensors& p) { return weighted_sum(torch::gelu(x.to(torch::kDouble) + p[0])); });
}

TEST_CASE("the ends of residual branches write and add to grad slots") {
  torch::manual_seed(4);
  // GPUs round this rate up to 2^-16, so these 6,400 elements drop next to nothing.
  const double p_drop = GENERATE(0.0, 1e-6);
  CAPTURE(p_drop);
  const auto branch = parameter({100, 64}), residual = parameter({100, 64});
  const auto branch2 = branch.to(torch::kDouble), residual2 = residual.to(torch::kDouble);
  const Tensors all = {parameter({64}), parameter({64}), parameter({64})};
  check_slots(
      all,
      [&] {
        const auto end = ddp::ops::add_layer_norm(branch, residual, all[1], all[2], 1e-5,
                                                  {.bias = all[0], .dropout_p = p_drop});
        return weighted_sum(end.normed) + weighted_sum(end.residual);
      },
      [&](const Tensors& p) {
        const auto sum = branch2 + p[0] + residual2;
        return weighted_sum(torch::layer_norm(sum, {64}, p[1], p[2], 1e-5)) + weighted_sum(sum);
      });
  if (p_drop > 0) {  // without dropout, PyTorch's ops add branch and bias
    const Tensors bias = {parameter({64})};
    check_slots(
        bias,
        [&] {
          return weighted_sum(
              ddp::ops::add_branch(branch, residual, {.bias = bias[0], .dropout_p = p_drop}));
        },
        [&](const Tensors& p) { return weighted_sum(branch2 + p[0] + residual2); });
  }
}

TEST_CASE("split_heads writes and adds the projections' bias gradient to a grad slot") {
  torch::manual_seed(5);
  const auto qkv = parameter({2, 50, 4 * 16});
  const Tensors bias = {parameter({4 * 16})};
  check_slots(
      bias,
      [&] {
        const auto included = qkv + bias[0].detach();
        const auto heads = ddp::ops::split_heads(included, 2, 1, {.added_bias = bias[0]});
        return weighted_sum(heads.query) + weighted_sum(heads.key) + weighted_sum(heads.value);
      },
      [&](const Tensors& p) {
        const auto parts = (qkv.to(torch::kDouble) + p[0]).view({2, 50, 4, 16});
        return weighted_sum(parts);
      });
}

TEST_CASE("the head's loss writes and adds to grad slots") {
  torch::manual_seed(6);
  constexpr int64_t kWords = 509;  // padded to 512
  const auto hidden = parameter({100, 64});
  const auto labels = torch::randint(kWords, {100}, torch::kLong).to(torch::kCUDA);
  Tensors all = {parameter({kWords, 64}, 0.125), parameter({kWords})};
  ddp::ops::pad_rows(all[0]);
  check_slots(
      all,
      [&] {
        const auto head = ddp::ops::linear_cross_entropy(hidden, all[0], labels, {.bias = all[1]});
        return head.loss_sum * 0.5;
      },
      [&](const Tensors& p) {
        const auto logits = torch::linear(hidden.to(torch::kDouble), p[0], p[1]);
        return torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum) * 0.5;
      });
}

TEST_CASE("inputs of kernels have gradients where ATen's have them, whichever results are used") {
  ddp::test::check_partly_used_ops(at::kCUDA);
}
