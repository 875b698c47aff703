// SPDX-License-Identifier: Apache-2.0
// A backward that throws on all ranks; the program catches the exception and continues.
#include "distributed/ddp_test_utils.hpp"
#include "support/fuse.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

enum class Place { BehindAllGradients, HalfWay, BeforeAllGradients };

// Wide layers, so that a reduction is still running when the next step begins.
struct FusedMlpImpl : MlpImpl {
  FusedMlpImpl() : MlpImpl(7, 256) {}
  torch::Tensor forward(torch::Tensor x) {
    if (place == Place::BehindAllGradients) {
      x = Fuse::apply(x.detach().requires_grad_());
    }
    auto hidden = torch::relu(second(torch::relu(first(x))));
    auto y = third(place == Place::HalfWay ? Fuse::apply(hidden) : hidden);
    return place == Place::BeforeAllGradients ? Fuse::apply(y) : y;
  }
  Place place = Place::BehindAllGradients;
};
TORCH_MODULE(FusedMlp);

struct Sides {
  explicit Sides(const DdpOptions& options) : model(module, group(), options) {}

  torch::Tensor loss(int step) { return model.forward(batch_of(rank(), step, 4)).sum(); }
  void break_backward(int step) {
    auto broken = loss(step);
    Fuse::blows = true;
    REQUIRE_THROWS_WITH(broken.backward(), Catch::Contains("the fuse blew"));
    Fuse::blows = false;
  }
  void require_mean(int step) {
    const auto expected = mean_reference(
        reference, [&](FusedMlp& plain) { return plain->forward(concatenated(step, 4)).sum(); });
    require_equal(grads_of(*module), expected);
  }

  FusedMlp module;
  FusedMlp reference;
  DistributedDataParallel<FusedMlp> model;
};

}  // namespace

TEST_CASE("the step after a backward that threw on all ranks is exact") {
  const auto place = GENERATE(Place::BehindAllGradients, Place::HalfWay, Place::BeforeAllGradients);
  const std::string mode = GENERATE("plain", "all_reduce", "find_unused", "static");
  const double cap = GENERATE(25.0, 1.0 / (1 << 20));
  const bool zeroes = GENERATE(true, false);
  CAPTURE(place, mode, cap, zeroes);
  auto options = with_cap(cap);
  options.find_unused_parameters = mode == "find_unused";
  options.static_graph = mode == "static";
  options.comm_hook = mode == "all_reduce" ? CommHookType::AllReduce : CommHookType::None;
  Sides sides(options);
  sides.module->place = sides.reference->place = place;
  for (int step = 0; step < 8; ++step) {
    CAPTURE(step);
    if (step % 3 == 1) {
      sides.break_backward(step);
      continue;
    }
    // Gradients of a failed backward are dropped, even if the program does not clear them.
    if (zeroes || step % 3 == 0) {
      sides.model.zero_grad();
    }
    sides.loss(step).backward();
    sides.require_mean(step);
  }
}

TEST_CASE("a first backward that throws is no first backward") {
  const bool is_static = GENERATE(false, true);
  DdpOptions options;
  options.static_graph = is_static;
  Sides sides(options);
  sides.module->place = sides.reference->place = Place::HalfWay;
  for (int step = 0; step < 2; ++step) {
    sides.break_backward(step);
  }
  for (int step = 2; step < 6; ++step) {
    sides.model.zero_grad();
    sides.loss(step).backward();
    sides.require_mean(step);
  }
  REQUIRE(sides.model.logging_data().num_synchronised_backwards == 4);
}

TEST_CASE("a micro-step that throws, inside and behind no_sync") {
  Sides sides(DdpOptions{});
  sides.module->place = sides.reference->place = Place::HalfWay;
  for (int step = 0; step < 6; ++step) {
    if (step == 2) {
      const auto local = sides.model.no_sync();
      sides.break_backward(step);
    } else if (step == 4) {
      {
        const auto local = sides.model.no_sync();
        sides.loss(step).backward();
      }
      sides.break_backward(step);
      const auto local = sides.model.no_sync();  // the first training forward after the failure
      sides.loss(step);
    }
    sides.model.zero_grad();
    sides.loss(step).backward();
    sides.require_mean(step);
  }
}

TEST_CASE("the count of a weighted_backward that failed is gone") {
  const bool on_device_count = GENERATE(false, true);
  const bool local = GENERATE(false, true);
  CAPTURE(on_device_count, local);
  Sides sides(DdpOptions{});
  const auto weighted = [&](const torch::Tensor& loss_sum, double count) {
    on_device_count ? sides.model.weighted_backward(loss_sum, torch::full({1}, count, on_device()))
                    : sides.model.weighted_backward(loss_sum, count);
  };
  for (int step = 0; step < 6; step += 2) {
    CAPTURE(step);
    sides.model.zero_grad();
    sides.loss(step).backward();
    sides.require_mean(step);
    {
      std::optional<NoSync> guard;
      if (local) {
        guard.emplace(sides.model);
      }
      // One backward without a graph, and one that throws.
      auto loss = sides.loss(step + 1);
      REQUIRE_THROWS(weighted(torch::ones({}, on_device()), 4));
      Fuse::blows = true;
      REQUIRE_THROWS_WITH(weighted(loss, 4), Catch::Contains("the fuse blew"));
      Fuse::blows = false;
    }
    sides.model.zero_grad();
    sides.loss(step).backward();
    sides.require_mean(step);
  }
  // A count from before the failed backward is kept.
  sides.model.zero_grad();
  {
    const auto guard = sides.model.no_sync();
    weighted(sides.loss(0), 4);
    REQUIRE_THROWS(weighted(torch::ones({}, on_device()), 100));
  }
  weighted(sides.loss(1), 4);
  auto expected = mean_reference(sides.reference, [&](FusedMlp& plain) {
    return plain->forward(concatenated(0, 4)).sum() + plain->forward(concatenated(1, 4)).sum();
  });
  for (auto& grad : expected) {
    grad.div_(8);
  }
  require_equal(grads_of(*sides.module), expected);
}

TEST_CASE("a rank that caught an exception alone is told that the replicas have diverged") {
  if (world() == 1) {
    return;
  }
  Sides sides(DdpOptions{});
  sides.loss(0).backward();
  if (rank() == world() - 1) {
    sides.break_backward(1);
    REQUIRE_THROWS_WITH(sides.loss(2), Catch::Contains("the replicas have diverged") &&
                                           Catch::Contains("but rank 0 did not"));
  } else {
    sides.loss(1).backward();
    context().control_plane().all_gather("stop?");  // like a training loop's poll
  }
}
