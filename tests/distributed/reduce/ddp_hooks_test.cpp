// SPDX-License-Identifier: Apache-2.0
// Comm hooks and join.
#include <algorithm>

#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "reduce/hooks/comm_hook_table.hpp"

using namespace ddp;
using namespace ddp::test;
using ddp::detail::make_all_reduce_hook;
using ddp::detail::make_powersgd_hook;

namespace {

std::vector<torch::Tensor> expected_at(Mlp& reference, int step) {
  return mean_reference(reference,
                        [&](Mlp& plain) { return plain->forward(concatenated(step, 4)).sum(); });
}

}  // namespace

TEST_CASE("the built-in hooks leave the mean") {
  // The gradients are integers below 2^8, so even bf16 represents them exactly; the test checks
  // this first.
  for (const auto hook :
       {CommHookType::AllReduce, CommHookType::Fp16Compress, CommHookType::Bf16Compress}) {
    for (const double cap : bucket_caps()) {
      CAPTURE(hook, cap);
      auto options = with_cap(cap);
      options.comm_hook = hook;
      Mlp module(3, 1);
      Mlp reference(3, 1);
      DistributedDataParallel model(module, group(), options);
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        model.forward(batch_of(rank(), step, 4)).sum().backward();
        const auto expected = expected_at(reference, step);
        for (const auto& grad : expected) {
          REQUIRE((grad * world()).abs().max().item<float>() <= 256);
        }
        require_equal(grads_of(*module), expected);
      }
    }
  }
}

TEST_CASE("hooks and the weighted mean") {
  for (const auto hook :
       {CommHookType::AllReduce, CommHookType::Fp16Compress, CommHookType::Bf16Compress}) {
    DdpOptions options;
    options.comm_hook = hook;
    Mlp module(3, 1);
    Mlp reference(3, 1);
    DistributedDataParallel model(module, group(), options);
    model.weighted_backward(model.forward(batch_of(rank(), 0, 4, 4)).sum(), 4);
    reference->forward(concatenated(0, 4, 4)).sum().backward();
    auto expected = grads_of(*reference);
    for (auto& grad : expected) {
      grad.div_(4 * world());
    }
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("a user's hook sees undivided gradients, in order, and its result is kept") {
  struct Seen {
    std::vector<int> indices;
    int last = 0;
  } seen;
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group(), with_cap(1.0 / (1 << 20)));
  model.register_comm_hook(make_function_hook("twice", [&seen](GradBucket& bucket) {
    seen.indices.push_back(bucket.index);
    seen.last += bucket.is_last ? 1 : 0;
    bucket.buffer.mul_(2).div_(bucket.divisor);
    return bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Sum);
  }));
  for (int step = 0; step < 2; ++step) {
    seen = {};
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    auto expected = expected_at(reference, step);
    for (auto& grad : expected) {
      grad.mul_(2);
    }
    require_equal(grads_of(*module), expected);
    REQUIRE(seen.last == 1);
    REQUIRE(std::is_sorted(seen.indices.begin(), seen.indices.end()));
  }
  REQUIRE_THROWS_AS(model.register_comm_hook(make_all_reduce_hook()), SettingsError);
}

TEST_CASE("a hook may leave its result in a tensor of its own") {
  for (const bool in_finish : {false, true}) {
    CAPTURE(in_finish);
    struct Assigning : CommHook {
      explicit Assigning(bool late) : in_finish(late) {}
      std::string name() const override { return "assigning"; }
      void start(GradBucket& bucket) override {
        kept = bucket.buffer / bucket.divisor;
        if (!in_finish) {
          bucket.buffer = kept;
        }
      }
      void finish(GradBucket& bucket) override {
        if (in_finish) {
          kept = bucket.buffer / bucket.divisor;
        }
        bucket.communicator->all_reduce(kept, ReduceOp::Sum)->wait();
        bucket.buffer = kept;
      }
      bool in_finish;
      torch::Tensor kept;
    };
    Mlp module;
    Mlp reference;
    DistributedDataParallel model(module, group());
    model.register_comm_hook(std::make_shared<Assigning>(in_finish));
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      model.forward(batch_of(rank(), step, 4)).sum().backward();
      require_equal(grads_of(*module), expected_at(reference, step));
    }
  }
}

TEST_CASE("a hook's result of another shape or dtype is refused by name") {
  const bool of_shape = GENERATE(true, false);
  Mlp module;
  DistributedDataParallel model(module, group());
  model.register_comm_hook(make_function_hook("shrinking", [&](GradBucket& bucket) {
    bucket.buffer = of_shape ? bucket.buffer.narrow(0, 0, 4) : bucket.buffer.to(torch::kDouble);
    return bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Avg);
  }));
  REQUIRE_THROWS_WITH(
      model.forward(batch_of(rank(), 0, 4)).sum().backward(),
      Catch::Contains("shrinking") && Catch::Contains("bucket.buffer of bucket 0") &&
          Catch::Contains(of_shape ? "Float [4] on" : "Double") && Catch::Contains("Float ["));
}

TEST_CASE("a hook's result that is refused leaves nothing behind for the next step") {
  bool shrinks = false;
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group(), with_cap(bucket_caps().back()));
  model.register_comm_hook(make_function_hook("shrinking", [&](GradBucket& bucket) {
    bucket.buffer.div_(bucket.divisor);
    auto work = bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Sum);
    if (shrinks && bucket.index % 2 == 0) {
      bucket.buffer = bucket.buffer.narrow(0, 0, 1);
    }
    return work;
  }));
  for (int step = 0; step < 6; ++step) {
    model.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    shrinks = step % 2 == 1;
    if (shrinks) {
      REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("bucket.buffer of bucket 0"));
    } else {
      loss.backward();
      require_equal(grads_of(*module), expected_at(reference, step));
    }
  }
}

TEST_CASE("check_collectives finds another size of a hook's tensor before it is sent") {
  if (world() == 1 || !checks_collectives()) {
    return;
  }
  bool is_odd = false;
  auto odd = torch::ones({rank() == 1 ? 8 : 4}, on_device());
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  model.register_comm_hook(make_function_hook("odd", [&](GradBucket& bucket) {
    return bucket.communicator->all_reduce(is_odd ? odd : bucket.buffer.div_(bucket.divisor));
  }));
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    is_odd = step % 2 == 1;
    if (is_odd) {
      REQUIRE_THROWS_WITH(
          loss.backward(),
          Catch::Contains("rank 0 called all_reduce (sum of 4 Float; bucket 0: ") &&
              Catch::Contains("rank 1 called all_reduce (sum of 8 Float; bucket 0: "));
      REQUIRE(odd.eq(1).all().item<bool>());
      is_odd = false;
    } else {
      loss.backward();
      require_equal(grads_of(*module), expected_at(reference, step));
    }
  }
}

TEST_CASE("hooks that cannot reduce are refused at once") {
  REQUIRE_THROWS_WITH(make_powersgd_hook({.rank = 0}),
                      Catch::Contains("ddp.powersgd_rank=0 must be 1 or more"));
  REQUIRE_THROWS_WITH(make_powersgd_hook({.start_step = -1}),
                      Catch::Contains("ddp.powersgd_start_step=-1"));
  REQUIRE_THROWS_WITH(make_powersgd_hook({.min_compression_rate = 0}),
                      Catch::Contains("min_compression_rate=0"));
  REQUIRE_THROWS_WITH(make_function_hook("empty", nullptr), Catch::Contains("empty"));
  DdpOptions options;
  options.comm_hook = CommHookType::PowerSgd;
  options.powersgd_rank = 0;
  Mlp module;
  REQUIRE_THROWS_AS(DistributedDataParallel(module, group(), options), SettingsError);
  DistributedDataParallel model(module, group());
  REQUIRE_THROWS_WITH(model.register_comm_hook(nullptr), Catch::Contains("the hook is null"));
}

TEST_CASE("different hooks on the ranks are an error before any gradient moves") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(25));
  if (rank() == 0) {
    model.register_comm_hook(make_powersgd_hook({.rank = 2}));
  } else {
    model.register_comm_hook(make_powersgd_hook({.rank = 3}));
  }
  if (world() == 1) {
    model.forward(batch_of(rank(), 0, 4));
    return;
  }
  try {
    model.forward(batch_of(rank(), 0, 4));
    FAIL("different hooks went unnoticed");
  } catch (const MismatchError& error) {
    const std::string message = error.what();
    REQUIRE(message.find("rank 1 has \"powersgd rank=3 ") != std::string::npos);
    REQUIRE(message.find("rank 0 has \"powersgd rank=2 ") != std::string::npos);
  }
}

TEST_CASE("a hook comes before the first forward") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(25));
  model.forward(batch_of(rank(), 0, 4)).sum().backward();
  REQUIRE_THROWS_AS(model.register_comm_hook(make_all_reduce_hook()), SettingsError);
}

TEST_CASE("powersgd: full rank is exact up to rounding, low rank sends the rest later") {
  const auto run = [](int64_t powersgd_rank, int steps) {
    DdpOptions options;
    auto weight = torch::zeros({16, 12}, on_device()).requires_grad_();
    auto bias = torch::zeros({12}, on_device()).requires_grad_();
    DataParallelModel model({.parameters = {{"weight", weight}, {"bias", bias}}}, group(), options);
    model.register_comm_hook(
        make_powersgd_hook({.rank = powersgd_rank, .start_step = 1, .min_compression_rate = 0.1}));
    auto sum = torch::zeros_like(weight);
    for (int step = 0; step < steps; ++step) {
      model.zero_grad();
      auto loss = (weight * integers({16, 12}, rank())).sum() + (bias * (rank() + 1)).sum();
      model.prepare_for_backward({loss});
      loss.backward();
      sum += weight.grad();
      const double mean_rank = (world() + 1) / 2.0;
      REQUIRE(torch::equal(bias.grad(), torch::full({12}, mean_rank, on_device())));
    }
    auto mean = torch::zeros_like(weight);
    for (int r = 0; r < world(); ++r) {
      mean += integers({16, 12}, r) / world();
    }
    return (sum / steps - mean).norm().item<double>() / mean.norm().item<double>();
  };
  REQUIRE(run(12, 4) < 1e-5);
  // Error feedback: later steps make up for the loss of earlier ones, so the average converges.
  const double short_run = run(2, 4);
  const double long_run = run(2, 60);
  REQUIRE(short_run > 0.05);
  REQUIRE(long_run < short_run / 4);
}

TEST_CASE("join: ranks with fewer batches shadow the others") {
  for (const bool initial_divisor : {true, false}) {
    for (const double cap : bucket_caps()) {
      CAPTURE(initial_divisor, cap);
      Mlp module;
      Mlp reference;
      DistributedDataParallel model(module, group(), with_cap(cap));
      const auto batches_of = [](int r) { return 2 + r; };  // rank r has 2 + r batches
      int steps = 0;
      join(model,
           [&] {
             for (; steps < batches_of(rank()); ++steps) {
               model.zero_grad();
               model.forward(batch_of(rank(), steps, 4)).sum().backward();
               reference->zero_grad();
               int active = 0;
               for (int r = 0; r < world(); ++r) {
                 if (steps < batches_of(r)) {
                   ++active;
                   reference->forward(batch_of(r, steps, 4)).sum().backward();
                 }
               }
               auto expected = grads_of(*reference);
               for (auto& grad : expected) {
                 grad.div_(initial_divisor ? world() : active);
               }
               require_equal(grads_of(*module), expected);
               // A step gives the last active rank other weights than the joined ranks.
               const torch::NoGradGuard no_grad;
               module->third->bias.add_(1);
               reference->third->bias.add_(1);
             }
           },
           {.divide_by_initial_world_size = initial_divisor});
      // All ranks end with the model of the last active rank.
      const auto added = module->third->bias - integers({3}, 705);
      REQUIRE(torch::equal(added, torch::full({3}, 1.0 + world(), on_device())));
    }
  }
}

TEST_CASE("join with weights: the divisor is the sum of the weights") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  const auto batches_of = [](int r) { return r == 0 ? 3 : 2; };
  join(model,
       [&] {
         for (int step = 0; step < batches_of(rank()); ++step) {
           model.zero_grad();
           model.weighted_backward(model.forward(batch_of(rank(), step, 4, 4)).sum(), 4);
           reference->zero_grad();
           int items = 0;
           for (int r = 0; r < world(); ++r) {
             if (step < batches_of(r)) {
               items += 4;
               reference->forward(batch_of(r, step, 4, 4)).sum().backward();
             }
           }
           auto expected = grads_of(*reference);
           for (auto& grad : expected) {
             grad.div_(items);
           }
           require_equal(grads_of(*module), expected);
         }
       },
       {.weighted = true});
}

TEST_CASE("join leaves the gradients of a rank that ran out as they were") {
  for (const bool initial_divisor : {true, false}) {
    CAPTURE(initial_divisor);
    Mlp module;
    DistributedDataParallel model(module, group());
    std::vector<torch::Tensor> before;
    const int own_batches = rank() == 0 ? 1 : 4;
    join(model,
         [&] {
           for (int step = 0; step < own_batches; ++step) {
             model.zero_grad();
             model.forward(batch_of(rank(), step, 4)).sum().backward();
           }
           module->first->bias.mutable_grad() = torch::Tensor();
           module->second->bias.mutable_grad() = torch::ones_like(module->second->bias);
           before = grads_of(*module);
         },
         {.divide_by_initial_world_size = initial_divisor});
    require_equal(grads_of(*module), before);
    // The next backward adds only to the gradients that a rank kept.
    model.forward(batch_of(rank(), 7, 4)).sum().backward();
    Mlp plain;
    const auto added = expected_at(plain, 7);
    REQUIRE(torch::equal(module->first->bias.grad(), added[1]));
    REQUIRE(torch::equal(module->second->bias.grad(), added[3] + 1));
  }
}

namespace {

// The mean of the gradients that ranks from `first` to `last` have in `steps`.
std::vector<torch::Tensor> mean_of_ranks(Mlp& plain, int first, int last,
                                         const std::vector<int64_t>& steps, int divisor) {
  plain->zero_grad();
  for (int r = first; r <= last; ++r) {
    for (const auto step : steps) {
      loss_of(plain, batch_of(r, step, 4)).backward();
    }
  }
  auto grads = grads_of(*plain);
  for (auto& grad : grads) {
    grad.div_(divisor);
  }
  return grads;
}

enum class LoopOrder { ForwardFirst, MetricsBeforeStep, MetricsAfterStep };

}  // namespace

TEST_CASE("join: a step has its own mean alone, in every order of the loop's calls") {
  const auto order =
      GENERATE(LoopOrder::ForwardFirst, LoopOrder::MetricsBeforeStep, LoopOrder::MetricsAfterStep);
  const bool initial_divisor = GENERATE(true, false);
  CAPTURE(order, initial_divisor);
  Mlp module, plain;
  DistributedDataParallel model(module, group());
  const auto log_metrics = [&] {
    const torch::NoGradGuard no_grad;
    model.forward(batch_of(rank(), 90, 4));
  };
  join(model,
       [&] {
         for (int step = 0; step < world() + 1 - rank(); ++step) {  // rank 0 has the most batches
           CAPTURE(step);
           if (order != LoopOrder::ForwardFirst) {
             model.zero_grad();
           }
           const auto loss = model.forward(batch_of(rank(), step, 4)).sum();
           if (order == LoopOrder::ForwardFirst) {
             model.zero_grad();
           }
           loss.backward();
           if (order == LoopOrder::MetricsBeforeStep) {
             log_metrics();
           }
           const int num_active = std::min(world(), world() + 1 - step);
           require_equal(grads_of(*module), mean_of_ranks(plain, 0, num_active - 1, {step},
                                                          initial_divisor ? world() : num_active));
           if (order == LoopOrder::MetricsAfterStep) {
             log_metrics();
           }
         }
       },
       {.divide_by_initial_world_size = initial_divisor});
  for (int step = 7; step < 9; ++step) {
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    require_equal(grads_of(*module), mean_of_ranks(plain, 0, world() - 1, {step}, world()));
  }
}

TEST_CASE("join: a rank may run out before the synchronised backward of an accumulation") {
  enum class Zero { Never, InPlace, Undefined };
  const auto zero = GENERATE(Zero::Never, Zero::InPlace, Zero::Undefined);
  CAPTURE(zero);
  Mlp module, plain;
  DistributedDataParallel model(module, group());
  model.forward(batch_of(rank(), 0, 4)).sum().backward();
  join(model,
       [&] {
         if (zero == Zero::Undefined) {
           model.zero_grad();
         } else if (zero == Zero::InPlace) {
           for (auto& parameter : module->parameters()) {
             parameter.mutable_grad().zero_();
           }
         }
         for (const int step : {1, 2}) {
           const auto local = model.no_sync();
           model.forward(batch_of(rank(), step, 4)).sum().backward();
         }
         const int first = world() > 1 ? 1 : 0;
         if (rank() < first) {
           return;
         }
         model.forward(batch_of(rank(), 3, 4)).sum().backward();
         auto expected = mean_of_ranks(plain, first, world() - 1, {1, 2, 3}, world() - first);
         if (zero == Zero::Never) {
           const auto earlier = mean_of_ranks(plain, 0, world() - 1, {0}, world());
           for (size_t i = 0; i < expected.size(); ++i) {
             expected[i] = expected[i] + earlier[i];
           }
         }
         const auto actual = grads_of(*module);
         for (size_t i = 0; i < actual.size(); ++i) {  // a third is not exact
           INFO("actual " << actual[i] << "\nexpected " << expected[i]);
           REQUIRE(torch::allclose(actual[i], expected[i], 1e-5, 1e-5));
         }
       },
       {.divide_by_initial_world_size = false});
}

TEST_CASE("join can throw on all ranks as soon as one runs out") {
  if (world() == 1) {
    return;
  }
  Mlp module;
  DistributedDataParallel model(module, group());
  const auto loop = [&] {
    for (int step = 0; step < 2 + rank(); ++step) {
      model.zero_grad();
      model.forward(batch_of(rank(), step, 4)).sum().backward();
    }
  };
  REQUIRE_THROWS_WITH(join(model, loop, {.throw_on_early_termination = true}),
                      Catch::Contains("rank 0 ran out"));
}
