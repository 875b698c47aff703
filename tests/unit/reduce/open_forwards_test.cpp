// SPDX-License-Identifier: Apache-2.0
#include "reduce/open_forwards.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "ddp/core/error.hpp"
#include "fake_communicator.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::detail::Backward;
using ddp::detail::Forwards;
using ddp::detail::GradientHooks;
using ddp::detail::OpenForwards;
using testing::message_of;

namespace {

const ddp::DdpOptions kFindsUnused{.find_unused_parameters = true};

struct ForwardsOfTwo {
  explicit ForwardsOfTwo(const ddp::DdpOptions& options = {})
      : forwards(std::make_unique<OpenForwards>(options, hooks, [this](auto) { ++num_reached; })) {}

  /// A forward that uses one parameter, or both.
  at::Tensor forward(bool uses_a, bool uses_b) {
    auto output = at::zeros({});
    output = uses_a ? output + parameters[0].tensor.sum() : output;
    output = uses_b ? output + parameters[1].tensor.sum() : output;
    forwards->add({output});
    return output;
  }
  at::Tensor forward() { return forward(true, true); }
  /// Its outputs have no graph that OpenForwards could watch.
  void untracked_forward() { forwards->add({at::zeros({})}); }

  ddp::NamedParameters parameters = testing::parameters_a_and_b();
  GradientHooks hooks{parameters, [](int) {}};
  int num_reached = 0;
  std::unique_ptr<OpenForwards> forwards;
};

}  // namespace

TEST_CASE("a forward is open until its backward") {
  ForwardsOfTwo two;
  CHECK_FALSE(two.forwards->has_unreached());
  const auto output = two.forward();
  CHECK(two.forwards->has_unreached());
  CHECK(two.num_reached == 0);
  output.backward();
  CHECK(two.num_reached == 1);
  CHECK_FALSE(two.forwards->has_unreached());
  CHECK_FALSE(two.forwards->expect_another_backward());
}

TEST_CASE("the last forward decides about a backward that reaches no output") {
  const bool is_static = GENERATE(false, true);
  ForwardsOfTwo two({.static_graph = is_static});
  CHECK(two.forwards->kind(/*waits=*/false) == Forwards::Neither);
  const auto output = two.forward();
  // In a static graph it may be a nested backward, and the forward's own is still to come.
  CHECK(two.forwards->kind(/*waits=*/true) ==
        (is_static ? Forwards::Neither : Forwards::Synchronised));
  two.forwards->add_local({});
  CHECK(two.forwards->kind(/*waits=*/true) == Forwards::Neither);
  output.backward();
  two.forwards->expect_another_backward();
  CHECK(two.forwards->kind(/*waits=*/false) == Forwards::Local);
  two.forwards->add_local({});
  CHECK(two.forwards->kind(/*waits=*/false) == Forwards::Local);
  const auto next = two.forward();
  next.backward();
  two.forwards->expect_another_backward();
  CHECK(two.forwards->kind(/*waits=*/false) == Forwards::Neither);
}

TEST_CASE("an output tells whether its backward is a first, a repeated or a local one") {
  ForwardsOfTwo two;
  std::vector<Backward> reached;
  OpenForwards forwards({}, two.hooks, [&](Backward backward) { reached.push_back(backward); });
  const auto output = (two.parameters[0].tensor * 2).sum();
  const auto local = (two.parameters[1].tensor * 2).sum();
  forwards.add({output});
  forwards.add_local({local});
  output.backward({}, /*retain_graph=*/true);
  local.backward({}, /*retain_graph=*/true);
  output.backward({}, /*retain_graph=*/true);
  CHECK((reached == std::vector{Backward::Synchronised, Backward::Local, Backward::Synchronised}));
  forwards.expect_another_backward();
  reached.clear();
  output.backward();
  local.backward();
  CHECK((reached == std::vector{Backward::Repeated, Backward::Local}));
}

TEST_CASE("a forward whose outputs are gone expects no backward") {
  ForwardsOfTwo two;
  two.forward();
  CHECK_FALSE(two.forwards->has_unreached());
  const auto output = two.forward();
  two.forwards->add_local({});
  CHECK(two.forwards->has_unreached());
  two.forwards->clear();
  CHECK_FALSE(two.forwards->has_unreached());
}

TEST_CASE("a backward is one of an open forward if an output is in its graph") {
  ForwardsOfTwo two;
  const auto& a = two.parameters[0].tensor;
  bool is_one = false;
  a.register_hook([&](const at::Tensor&) { is_one = two.forwards->in_running_backward(); });
  CHECK_FALSE(two.forwards->in_running_backward());
  const auto output = two.forward(false, true);
  a.sum().backward();
  CHECK_FALSE(is_one);
  (output + a.sum()).backward();  // the node of a.sum(), made last, runs before the output's
  CHECK(is_one);
}

TEST_CASE("torch::autograd::grad is no backward, one with inputs is") {
  ForwardsOfTwo two;
  const auto output = two.forward() * 2;
  torch::autograd::grad({output}, {two.parameters[0].tensor}, {}, /*retain_graph=*/true);
  CHECK(two.forwards->has_unreached());
  CHECK(two.num_reached == 0);
  torch::autograd::backward({output}, {}, {}, false, {two.parameters[0].tensor});
  CHECK_FALSE(two.forwards->has_unreached());
  CHECK(two.num_reached == 1);
}

TEST_CASE("one backward ends two forwards") {
  ForwardsOfTwo two;
  const auto first = two.forward();
  const auto second = two.forward();
  (first + second).backward();
  CHECK_FALSE(two.forwards->expect_another_backward());
}

TEST_CASE("two forwards may have a backward each") {
  ForwardsOfTwo two;
  const auto first = two.forward();
  const auto second = two.forward();
  first.backward();
  CHECK(two.forwards->expect_another_backward());
  second.backward();
  CHECK_FALSE(two.forwards->expect_another_backward());
}

TEST_CASE("forwards whose outputs are not known are counted") {
  ForwardsOfTwo two;
  two.untracked_forward();
  two.untracked_forward();
  two.forwards->add_local({});
  CHECK(two.forwards->kind(/*waits=*/true) == Forwards::Untracked);
  CHECK(two.forwards->expect_another_backward());
  two.forwards->add_local({});  // that backward was one of both
  CHECK(two.forwards->kind(/*waits=*/true) == Forwards::Local);
  CHECK_FALSE(two.forwards->expect_another_backward());
}

TEST_CASE("a second backward after two forwards is refused where one has to follow") {
  const bool is_static = GENERATE(true, false);
  ForwardsOfTwo two({.find_unused_parameters = !is_static, .static_graph = is_static});
  const auto first = two.forward();
  const auto second = two.forward();
  first.backward();
  CHECK_FALSE(two.forwards->expect_another_backward());
  const auto third = two.forward();
  CHECK_THAT(message_of([&] { second.backward(); }), Catch::Contains("sum the losses"));
  CHECK_NOTHROW(third.backward());
}

TEST_CASE("a second backward of one forward is refused with find_unused_parameters") {
  ForwardsOfTwo two(kFindsUnused);
  const auto of_a = two.parameters[0].tensor.sum();
  const auto of_b = two.parameters[1].tensor.sum();
  two.forwards->add({of_a, of_b});
  of_a.backward();
  two.forwards->close_reached();
  CHECK_THAT(message_of([&] { of_b.backward(); }),
             Catch::Contains("second backward after a forward"));
  CHECK(two.num_reached == 1);
}

TEST_CASE("reachable covers all open forwards") {
  ForwardsOfTwo two(kFindsUnused);
  const auto of_a = two.forward(true, false);
  CHECK(two.forwards->reachable() == std::vector<bool>{true, false});
  auto of_b = two.forward(false, true);
  CHECK(two.forwards->reachable() == std::vector<bool>{true, true});
  of_b = at::Tensor();  // no backward is to come for it
  const auto again = two.forward(true, false);
  CHECK(two.forwards->reachable() == std::vector<bool>{true, false});
}

TEST_CASE("nothing is walked without find_unused_parameters and in a static graph") {
  const bool is_static = GENERATE(true, false);
  ForwardsOfTwo two({.find_unused_parameters = is_static, .static_graph = is_static});
  const auto output = two.forward(true, false);
  CHECK(two.forwards->reachable() == std::vector<bool>{true, true});
}

TEST_CASE("a parameter is reached if it was trained in one of the open forwards") {
  const bool is_tracked = GENERATE(true, false);
  ForwardsOfTwo two;
  const auto run_forward = [&](bool trains_a, bool trains_b) {
    two.parameters[0].tensor.set_requires_grad(trains_a);
    two.parameters[1].tensor.set_requires_grad(trains_b);
    if (is_tracked) {
      return two.forward();
    }
    two.untracked_forward();
    return at::Tensor();
  };
  const auto first = run_forward(true, false);
  CHECK(two.forwards->reachable() == std::vector<bool>{true, false});
  const auto second = run_forward(false, true);
  CHECK(two.forwards->reachable() == std::vector<bool>{true, true});
  if (is_tracked) {
    first.backward();
  }
  REQUIRE(two.forwards->expect_another_backward());
  CHECK(two.forwards->reachable() == std::vector<bool>{!is_tracked, true});
}

TEST_CASE("find_unused_parameters needs outputs with a graph") {
  ForwardsOfTwo two(kFindsUnused);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { two.untracked_forward(); }),
             Catch::Contains("returned no tensor that requires a gradient"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { two.forwards->add({two.parameters[0].tensor}); }),
             Catch::Contains("returned only parameters,"));
}

TEST_CASE("torch::autograd::grad is no backward") {
  ForwardsOfTwo two;
  const auto output = two.forward();
  torch::autograd::grad({output}, {two.parameters[0].tensor});
  CHECK(two.num_reached == 0);
}

TEST_CASE("a returned parameter is not watched, for its hooks outlive every graph") {
  ForwardsOfTwo two;
  two.forwards->add({two.parameters[0].tensor});
  CHECK_FALSE(two.forwards->has_unreached());
  two.parameters[0].tensor.sum().backward();
  CHECK(two.num_reached == 0);
}

TEST_CASE("a graph may outlive the object that watches it") {
  ForwardsOfTwo two;
  const auto output = two.forward();
  two.forwards = nullptr;
  output.backward();
  CHECK(two.num_reached == 0);
  CHECK(two.parameters[0].tensor.grad().eq(1).all().item<bool>());
}
