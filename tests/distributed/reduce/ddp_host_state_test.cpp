// SPDX-License-Identifier: Apache-2.0
// A step that was begun but not run, as after a failed capture, does not affect the next one.
#include <stdexcept>

#include "distributed/ddp_test_utils.hpp"
#include "ops/shared/grad_slot.hpp"
#include "reduce/hooks/comm_hook_table.hpp"
#include "reduce/reducer.hpp"

using namespace ddp;
using namespace ddp::test;
using ddp::detail::make_powersgd_hook;

namespace {

/// Throws in the middle of a backward: the parameters before it in the forward get no gradient.
struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("half-way");
  }
};

struct HalfImpl : MlpImpl {
  bool throws = false;
  torch::Tensor forward(const torch::Tensor& x) {
    auto hidden = torch::relu(second(torch::relu(first(x))));
    return third(throws ? ThrowInBackward::apply(hidden) : hidden);
  }
};
TORCH_MODULE(Half);

}  // namespace

TEST_CASE("a backward that broke off is undone on the host") {
  for (const double cap : bucket_caps()) {
    CAPTURE(cap);
    Half module;
    Mlp reference;
    DistributedDataParallel model(module, group(), with_cap(cap));
    const auto backward = [&](int64_t step) {
      model.forward(batch_of(rank(), step, 4)).sum().backward();
    };
    REQUIRE_FALSE(model.reducer().is_settled());
    for (int64_t step = 0; step < 3; ++step) {
      model.zero_grad();
      backward(step);
    }
    REQUIRE(model.reducer().is_settled());
    const auto passes = model.logging_data().num_synchronised_backwards;
    const auto before = grads_of(*module);

    const auto state = model.reducer().state();
    module->throws = true;
    model.zero_grad();
    // Its first bucket may be in flight, equally on all ranks: the reduction ends, unused.
    REQUIRE_THROWS_WITH(backward(7), Catch::Contains("half-way"));
    module->throws = false;
    const auto* slot = ops::find_grad_slot(module->first->weight);
    REQUIRE(slot != nullptr);
    REQUIRE_FALSE(slot->stream.has_value());
    auto* left = const_cast<ops::GradSlot*>(slot);
    left->stream = c10::Stream(c10::Stream::DEFAULT, group()->device());
    model.reducer().restore(state);
    REQUIRE_FALSE(slot->stream.has_value());
    REQUIRE(model.logging_data().num_synchronised_backwards == passes);
    for (const auto& parameter : module->parameters()) {
      REQUIRE(parameter.grad().defined());
    }
    REQUIRE(before.size() == 6);

    model.zero_grad();
    backward(9);
    require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                    return plain->forward(concatenated(9, 4)).sum();
                  }));
  }
}

TEST_CASE("weights that were added before a step broke off stay") {
  const bool of_device = GENERATE(false, true);
  CAPTURE(of_device);
  Half module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  const auto weighted_backward = [&](const torch::Tensor& loss_sum, double count) {
    if (of_device) {
      model.weighted_backward(loss_sum, torch::full({1}, count, on_device()));
    } else {
      model.weighted_backward(loss_sum, count);
    }
  };
  for (int64_t step = 0; step < 3; ++step) {
    model.zero_grad();
    weighted_backward(model.forward(batch_of(rank(), step, 4, 4)).sum(), 4);
  }
  model.zero_grad();
  {
    const auto no_sync = model.no_sync();
    weighted_backward(model.forward(batch_of(rank(), 5, 4, 4)).sum(), 4);
  }
  const auto state = model.reducer().state();
  module->throws = true;
  REQUIRE_THROWS(weighted_backward(model.forward(batch_of(rank(), 6, 4, 4)).sum(), 100));
  module->throws = false;
  model.reducer().restore(state);
  // The slots hold the accumulator's sums from before the failure, so only the divisor is compared.
  // Undefined gradients would drop the count, too.
  for (const auto& parameter : module->parameters()) {
    parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  weighted_backward(model.forward(batch_of(rank(), 6, 4, 4)).sum(), 4);
  auto expected = mean_reference(
      reference, [&](Mlp& plain) { return plain->forward(concatenated(6, 4, 4)).sum(); });
  for (auto& grad : expected) {
    grad.div_(8);
  }
  require_equal(grads_of(*module), expected);
}

TEST_CASE("counts that go from one step to the next are known") {
  Mlp module;
  DistributedDataParallel model(module, group());
  auto& reducer = model.reducer();
  const auto step = [&](int64_t i) {
    model.weighted_backward(model.forward(batch_of(rank(), i, 4)).sum(), 3);
  };
  const auto before = reducer.state();
  step(0);
  CHECK(reducer.state().history.num_passes == before.history.num_passes + 1);
  CHECK(reducer.state().history.num_local_passes == before.history.num_local_passes);
  CHECK(ddp::detail::why_not_replayed(reducer, before).empty());
  const auto micro = reducer.state();
  {
    const auto no_sync = model.no_sync();
    step(1);
  }
  CHECK(reducer.state().history.num_local_passes == micro.history.num_local_passes + 1);
  CHECK_THAT(ddp::detail::why_not_replayed(reducer, micro), Catch::Contains("weighted_backward"));
  const auto last = reducer.state();
  step(2);
  CHECK_THAT(ddp::detail::why_not_replayed(reducer, last), Catch::Contains("all micro-batches"));
}

TEST_CASE("what can never be captured is known beforehand") {
  Mlp module;
  DdpOptions unused;
  unused.find_unused_parameters = true;
  REQUIRE_THAT(DistributedDataParallel(module, group(), unused).reducer().why_not_captured(),
               Catch::Contains("find_unused_parameters"));
  DistributedDataParallel model(module, group());
  REQUIRE(model.reducer().why_not_captured().empty());
  model.register_comm_hook(make_powersgd_hook({}));
  REQUIRE_THAT(model.reducer().why_not_captured(), Catch::Contains("powersgd"));
}
