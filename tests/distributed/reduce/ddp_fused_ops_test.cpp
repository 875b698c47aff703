// SPDX-License-Identifier: Apache-2.0
// Ops that write gradients straight into buckets, where several wrapped models share parameters,
// parameters are frozen, or hooks read gradients: always the gradients of plain LibTorch.
#include <torch/csrc/autograd/variable.h>

#include "ddp/core/error.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/reduce/fused_op_models.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// Two models in all orders of forwards and backwards.
const std::vector<std::string> kOrders = {"aAbB", "bBaA", "abAB", "abBA",
                                          "baAB", "baBA", "ab+",  "ba+"};

enum class Freezing {
  AtWrapping,
  AfterWrapping,
  BetweenForwardAndBackward,
  Thawed,
  ThawedBetweenForwardAndBackward
};

const std::vector<Freezing> kFreezings = {Freezing::AtWrapping, Freezing::AfterWrapping,
                                          Freezing::BetweenForwardAndBackward, Freezing::Thawed,
                                          Freezing::ThawedBetweenForwardAndBackward};

bool is_between(Freezing when) {
  return when == Freezing::BetweenForwardAndBackward ||
         when == Freezing::ThawedBetweenForwardAndBackward;
}

void check_frozen(OpRuns& runs, Freezing when, const std::vector<bool>& trained,
                  const std::string& events) {
  const std::vector<bool> all(trained.size(), true);
  if (when == Freezing::AtWrapping) {
    runs.set_trained(trained);
  }
  runs.wrap(events.find('b') != std::string::npos);
  for (int step = 0; step < 2; ++step) {
    runs.zero_grad();
    if (when == Freezing::AfterWrapping || (when == Freezing::Thawed && step == 0)) {
      runs.set_trained(trained);
    }
    if (when == Freezing::Thawed && step == 1) {
      runs.set_trained(all);
    }
    if (!is_between(when)) {
      runs.run(events, step);
    } else {
      const bool thaws = when == Freezing::ThawedBetweenForwardAndBackward;
      const auto& in_forward = thaws ? trained : all;
      const auto& in_backward = thaws ? all : trained;
      // The plain twin's forwards come after our backwards.
      int calls = 0;
      runs.set_trained(in_forward);
      run_events(
          events, step,
          [&](char which, int64_t s) {
            return runs.wrapper(which).forward(op_input(runs.op(), rank(), s));
          },
          [&] {
            ++calls;
            runs.set_trained(in_backward);
          });
      REQUIRE(calls == 1);
      runs.set_trained(in_forward);
      run_events(
          events, step,
          [&](char which, int64_t s) {
            return mean_loss(which == 'a' ? runs.plain.a : runs.plain.b, s);
          },
          [&] { runs.set_trained(in_backward); });
    }
    runs.check();
  }
}

}  // namespace

TEST_CASE("models that share an op's parameters get LibTorch's gradients in every order") {
  for (const auto& op : fused_ops(context().device())) {
    for (const bool is_one : {false, true}) {
      for (const auto& events : kOrders) {
        CAPTURE(op.name, is_one, events);
        OpRuns runs(op, is_one);
        runs.wrap(/*both=*/true);
        for (int step = 0; step < 3; ++step) {
          CAPTURE(step);
          if (step < 2) {  // the last one adds
            runs.zero_grad();
          }
          if (step == 1) {
            runs.run_locally(events, 10);
          }
          runs.run(events, step);
          runs.check();
        }
      }
    }
  }
}

TEST_CASE("an op's parameters have gradients like LibTorch's whenever they are frozen") {
  for (const auto& op : fused_ops(context().device())) {
    for (const auto when : kFreezings) {
      for (const auto& trained : choices_of_trained(op)) {
        for (const bool both : {false, true}) {
          if (both && when != Freezing::AfterWrapping &&
              when != Freezing::BetweenForwardAndBackward) {
            continue;
          }
          CAPTURE(op.name, static_cast<int>(when), trained, both);
          OpRuns runs(op, /*is_one=*/false);
          check_frozen(runs, when, trained, both ? "aAbB" : "aA");
        }
      }
    }
  }
}

TEST_CASE("recomputed ops of shared and of frozen parameters") {
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& events : {"aA", "aAbB", "abAB"}) {
      CAPTURE(op.name, events);
      OpRuns runs(op, /*is_one=*/false);
      runs.ours.set_recomputed();
      runs.wrap(std::string(events) != "aA");
      for (int step = 0; step < 2; ++step) {
        runs.zero_grad();
        runs.run(events, step);
        runs.check();
      }
    }
    for (const auto when : kFreezings) {
      for (const auto& trained : choices_of_trained(op)) {
        if (is_between(when)) {
          continue;  // the recomputation sees the change, PyTorch's too
        }
        CAPTURE(op.name, static_cast<int>(when), trained);
        OpRuns runs(op, /*is_one=*/false);
        runs.ours.set_recomputed();
        check_frozen(runs, when, trained, "aA");
      }
    }
  }
}

TEST_CASE("a module that is wrapped again, while the first wrapper lives and after it") {
  for (const auto& op : fused_ops(context().device())) {
    for (const bool older_ends : {false, true}) {
      CAPTURE(op.name, older_ends);
      OpRuns runs(op, /*is_one=*/true);
      const auto step = [&](const std::string& events, int number) {
        runs.zero_grad();
        runs.run(events, number);
        runs.check();
      };
      runs.wrap(/*both=*/false);
      step("aA", 0);
      runs.model_b = std::make_unique<OpWrapper>(runs.ours.b, group());
      step("bB", 1);
      step("aA", 2);
      (older_ends ? runs.model_a : runs.model_b).reset();
      for (int number = 3; number < 5; ++number) {
        step(older_ends ? "bB" : "aA", number);
      }
    }
  }
}

TEST_CASE("a forward of shared parameters whose outputs are not known is refused") {
  const auto weight = torch::ones({3}, on_device()).requires_grad_();
  DataParallelModel one({.parameters = {{"weight", weight}}}, group());
  one.prepare_for_backward();  // one model alone needs no outputs
  weight.sum().backward();
  DataParallelModel other({.parameters = {{"weight", weight}}}, group());
  one.zero_grad();
  REQUIRE_THROWS_WITH(one.prepare_for_backward(), Catch::Contains("weight") &&
                                                      Catch::Contains("several wrapped models") &&
                                                      Catch::Contains("{loss}"));
  const auto loss = (weight * (rank() + 1)).sum();
  one.prepare_for_backward({loss});
  loss.backward();
  CHECK(torch::equal(weight.grad(), torch::full_like(weight, (world() + 1) / 2.0)));
}

TEST_CASE("a gradient outlives the wrapper in whose bucket it lies") {
  const auto op = fused_ops(context().device()).front();
  OpRuns runs(op, /*is_one=*/false);
  runs.wrap(/*both=*/true);
  runs.run("aA", 0);
  runs.model_a.reset();
  runs.run("bB", 1);  // adds
  runs.check();
}

TEST_CASE("one optimizer of two models that share an op's parameters") {
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& events : {"aAbB", "ab+"}) {
      CAPTURE(op.name, events);
      OpRuns runs(op, /*is_one=*/false);
      runs.wrap(/*both=*/true);
      // Each model's own optimizer moves its parameters, the shared ones that of `a`.
      const auto rule_a = make_optimizer(*runs.model_a, {.type = OptimizerType::Sgd});
      for (int step = 0; step < 3; ++step) {
        runs.zero_grad();
        runs.run(events, step);
        rule_a->step(0.05);
        const torch::NoGradGuard no_grad;
        for (auto parameter : runs.plain.a->parameters()) {
          parameter.sub_(0.05 * parameter.grad());
        }
        for (size_t i = 0; i < runs.ours.shared.size(); ++i) {
          OpRuns::require_close(runs.ours.shared[i], runs.plain.shared[i]);
        }
      }
    }
  }
}

TEST_CASE("with ZeRO-1 frozen parameters of ops stay, and others move as with a whole optimizer") {
  for (const auto& op : fused_ops(context().device())) {
    for (const auto when : {Freezing::AtWrapping, Freezing::AfterWrapping, Freezing::Thawed}) {
      for (const auto& trained : choices_of_trained(op)) {
        CAPTURE(op.name, static_cast<int>(when), trained);
        OpRuns runs(op, /*is_one=*/true);
        if (when == Freezing::AtWrapping) {
          runs.set_trained(trained);
        }
        runs.wrap(/*both=*/false);
        const auto rule =
            make_optimizer(*runs.model_a, {.type = OptimizerType::Sgd, .zero1 = true});
        for (int step = 0; step < 2; ++step) {
          if (when != Freezing::AtWrapping) {
            const bool thaws = when == Freezing::Thawed && step == 1;
            runs.set_trained(thaws ? std::vector<bool>(trained.size(), true) : trained);
          }
          runs.zero_grad();
          runs.run("aA", step);
          rule->step(0.05);
          const torch::NoGradGuard no_grad;
          for (auto parameter : runs.plain.a->parameters()) {
            if (parameter.grad().defined()) {
              parameter.sub_(0.05 * parameter.grad());
            }
          }
          for (size_t i = 0; i < trained.size(); ++i) {
            OpRuns::require_close(runs.ours.shared[i], runs.plain.shared[i]);
          }
        }
      }
    }
  }
}

TEST_CASE("another model's backward is refused on a gradient that ZeRO-1 left in parts") {
  const auto op = fused_ops(context().device()).front();
  OpRuns runs(op, /*is_one=*/false);
  runs.wrap(/*both=*/true);
  const auto rule = make_optimizer(*runs.model_a, {.type = OptimizerType::Sgd, .zero1 = true});
  runs.run("aA", 0);
  REQUIRE_THROWS_WITH(runs.model_b->forward(op_input(runs.op(), rank(), 1)).backward(),
                      Catch::Contains("optimizer.zero1=true") && Catch::Contains("gradient of p"));
}

TEST_CASE("a step of ZeRO-1 before the other model's backward, and a step on its gradient") {
  for (const auto& op : fused_ops(context().device())) {
    CAPTURE(op.name);
    OpRuns runs(op, /*is_one=*/false);
    runs.wrap(/*both=*/true);
    const auto rule = make_optimizer(*runs.model_a, {.type = OptimizerType::Sgd, .zero1 = true});
    for (int step = 0; step < 2; ++step) {
      runs.zero_grad();
      runs.run("aA", step);
      rule->step(0.05);
      {
        const torch::NoGradGuard no_grad;
        for (auto parameter : runs.plain.a->parameters()) {
          parameter.sub_(0.05 * parameter.grad());
        }
      }
      runs.zero_grad();
      runs.run("bB", step + 10);
      for (size_t i = 0; i < runs.ours.shared.size(); ++i) {
        OpRuns::require_close(runs.ours.shared[i].grad(), runs.plain.shared[i].grad());
      }
    }
    REQUIRE_THROWS_WITH(rule->step(0.05), Catch::Contains("not the one that backward reduced"));
  }
}

TEST_CASE("hooks on an op's parameters see and change its gradients as in LibTorch") {
  for (const auto& op : fused_ops(context().device())) {
    for (const bool between : {false, true}) {
      CAPTURE(op.name, between);
      OpRuns runs(op, /*is_one=*/true);
      runs.wrap(/*both=*/false);
      int calls = 0;
      const auto add_hooks = [&](const OpPair& pair) {
        for (const auto& parameter : pair.shared) {
          parameter.register_hook([&calls](const torch::Tensor& grad) {
            ++calls;
            return grad * 0.5;
          });
        }
      };
      if (!between) {
        add_hooks(runs.ours);
      }
      runs.run_locally("aA", 0);
      const auto loss = runs.model_a->forward(op_input(op, rank(), 1));
      if (between) {
        add_hooks(runs.ours);
      }
      const int before = calls;
      loss.backward();
      CHECK(calls == before + static_cast<int>(op.parameters.size()));
      if (!between) {
        runs.plain.zero_grad();
        add_hooks(runs.plain);
        mean_loss(runs.plain.a, 'a').backward();  // the local one's batch
      } else {
        add_hooks(runs.plain);
      }
      mean_loss(runs.plain.a, 1).backward();
      runs.check();
    }
  }
}

namespace {

class CountingHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit CountingHook(int& defined) : defined_(defined) {}
  void operator()(const torch::autograd::Variable& tensor) override {
    defined_ += tensor.grad().defined() ? 1 : 0;
  }

 private:
  int& defined_;
};

}  // namespace

TEST_CASE("hooks after the accumulation find an op's gradient in .grad") {
  for (const auto& op : fused_ops(context().device())) {
    CAPTURE(op.name);
    OpRuns runs(op, /*is_one=*/true);
    runs.wrap(/*both=*/false);
    int defined = 0;
    for (const auto& parameter : runs.ours.shared) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameter,
                                                     std::make_unique<CountingHook>(defined));
    }
    runs.run("aA", 0);
    CHECK(defined == static_cast<int>(op.parameters.size()));
    runs.check();
  }
}
