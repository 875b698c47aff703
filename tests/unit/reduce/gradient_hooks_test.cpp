// SPDX-License-Identifier: Apache-2.0
#include "reduce/gradient_hooks.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "ddp/core/error.hpp"
#include "fake_communicator.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::detail::GradientHooks;
using testing::message_of;
using testing::parameters_a_and_b;

TEST_CASE("a hook runs for each parameter that gets a gradient, while the hooks live") {
  const auto parameters = parameters_a_and_b();
  std::vector<int> indices;
  auto hooks =
      std::make_unique<GradientHooks>(parameters, [&](int index) { indices.push_back(index); });
  (parameters[1].tensor * 2).sum().backward();
  CHECK(indices == std::vector<int>{1});
  CHECK(parameters[1].tensor.grad().eq(2).all().item<bool>());
  (parameters[0].tensor * 2).sum().backward();
  CHECK(indices == std::vector<int>{1, 0});
  const auto loss = (parameters[0].tensor * 2).sum();
  hooks = nullptr;
  loss.backward();
  CHECK(indices.size() == 2);
}

TEST_CASE("a hook before runs where AccumulateGrad adds something") {
  const auto parameters = parameters_a_and_b();
  int before = 0, after = 0;
  auto hooks = std::make_unique<GradientHooks>(
      parameters, [&](int) { ++after; }, [&](int) { before += after == 0 ? 1 : 10; });
  parameters[0].tensor.sum().backward();
  CHECK(before == 1);
  CHECK(after == 1);
  const auto accumulator = torch::autograd::impl::grad_accumulator(parameters[0].tensor);
  CHECK(accumulator->pre_hooks().size() == 1);
  hooks = nullptr;
  CHECK(accumulator->pre_hooks().empty());
}

TEST_CASE("a backward reaches the parameters of its graph") {
  const auto parameters = parameters_a_and_b();
  const GradientHooks hooks(parameters, [](int) {});
  const auto of_a = (parameters[0].tensor * 2).sum();
  const auto of_both = of_a + parameters[1].tensor.sum();
  CHECK(hooks.find_reachable({of_a}) == std::vector<bool>{true, false});
  CHECK(hooks.find_reachable({of_both}) == std::vector<bool>{true, true});
  CHECK(hooks.find_reachable({of_a.detach(), at::Tensor()}) == std::vector<bool>{false, false});
  CHECK(hooks.find_reachable({parameters[1].tensor}) == std::vector<bool>{false, true});
}

TEST_CASE("hooks stay while a parameter is frozen") {
  const auto parameters = parameters_a_and_b();
  int num_hooks = 0;
  const GradientHooks hooks(parameters, [&](int) { ++num_hooks; });
  CHECK(hooks.find_trained() == std::vector<bool>{true, true});
  parameters[1].tensor.set_requires_grad(false);
  CHECK(hooks.find_trained() == std::vector<bool>{true, false});
  CHECK_NOTHROW(hooks.check_attached());
  (parameters[0].tensor.sum() * parameters[1].tensor.sum()).backward();
  CHECK(num_hooks == 1);
  parameters[1].tensor.set_requires_grad(true);
  CHECK_NOTHROW(hooks.check_attached());
  parameters[1].tensor.sum().backward();
  CHECK(num_hooks == 2);
}

TEST_CASE("a parameter that was replaced after construction is named") {
  auto parameters = parameters_a_and_b();
  const GradientHooks hooks(parameters, [](int) {});
  auto& tensor = parameters[1].tensor;
  tensor.set_data(tensor.to(at::kDouble).detach());  // as Module::to(dtype) does
  CHECK_THAT(message_of<ddp::SettingsError>([&] { hooks.check_attached(); }),
             Catch::Contains("parameter b was replaced after wrapping"));
}
