// SPDX-License-Identifier: Apache-2.0
// Several models, several forwards, subgroups: one agreed order of launches, no deadlock.
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("two models in one backward, whichever runs first on a rank") {
  for (const double cap : bucket_caps()) {
    Mlp a(1), b(2), reference_a(1), reference_b(2);
    DistributedDataParallel model_a(a, group(), with_cap(cap));
    DistributedDataParallel model_b(b, group(), with_cap(cap));
    for (int step = 0; step < 4; ++step) {
      model_a.zero_grad();
      model_b.zero_grad();
      auto left = model_a.forward(batch_of(rank(), step, 4)).sum();
      auto right = model_b.forward(batch_of(rank(), step, 4)).sum();
      // The engine starts with the input whose node was created last; odd ranks reverse this order.
      (rank() % 2 == 0 ? left + right * 2 : right * 2 + left).backward();
      require_equal(grads_of(*a), mean_reference(reference_a, [&](Mlp& plain) {
                      return plain->forward(concatenated(step, 4)).sum();
                    }));
      require_equal(grads_of(*b), mean_reference(reference_b, [&](Mlp& plain) {
                      return plain->forward(concatenated(step, 4)).sum() * 2;
                    }));
    }
  }
}

TEST_CASE("a model whose forward ran but whose backward comes later does not hold others up") {
  Mlp a(1), b(2), reference_a(1), reference_b(2);
  DistributedDataParallel model_a(a, group());
  DistributedDataParallel model_b(b, group());
  for (int step = 0; step < 4; ++step) {
    model_a.zero_grad();
    model_b.zero_grad();
    auto loss_a = model_a.forward(batch_of(rank(), step, 4)).sum();
    auto loss_b = model_b.forward(batch_of(rank(), step, 4)).sum();
    loss_a.backward();
    loss_b.backward();
    require_equal(grads_of(*a), mean_reference(reference_a, [&](Mlp& plain) {
                    return plain->forward(concatenated(step, 4)).sum();
                  }));
    require_equal(grads_of(*b), mean_reference(reference_b, [&](Mlp& plain) {
                    return plain->forward(concatenated(step, 4)).sum();
                  }));
  }
}

TEST_CASE("two forwards before one backward, and before two backwards") {
  for (const bool find_unused : {false, true}) {
    DdpOptions options;
    options.find_unused_parameters = find_unused;
    Mlp module;
    Mlp reference;
    DistributedDataParallel model(module, group(), options);
    const auto expected = [&](int step) {
      return mean_reference(reference, [&](Mlp& plain) {
        return plain->forward(concatenated(step, 4)).sum() +
               plain->forward(concatenated(step + 50, 4)).sum();
      });
    };
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      auto first = model.forward(batch_of(rank(), step, 4)).sum();
      auto second = model.forward(batch_of(rank(), step + 50, 4)).sum();
      (first + second).backward();
      require_equal(grads_of(*module), expected(step));
    }
    if (find_unused) {
      continue;  // an error: see ddp_forwards_test.cpp
    }
    for (int step = 3; step < 6; ++step) {
      model.zero_grad();
      auto first = model.forward(batch_of(rank(), step, 4)).sum();
      auto second = model.forward(batch_of(rank(), step + 50, 4)).sum();
      first.backward();
      second.backward();
      require_equal(grads_of(*module), expected(step));
    }
  }
}

TEST_CASE("a model on a subgroup beside one on the world") {
  // Even and odd ranks form groups; at world size 1 the group is the world.
  auto half = group()->split(rank() % 2, rank());
  REQUIRE(half->world_size() == std::max(1, world() / 2));
  REQUIRE(&half->launch_sequencer() == &group()->launch_sequencer());  // one order for both
  Mlp everywhere(1), local(2), reference_everywhere(1), reference_local(2);
  DistributedDataParallel model(everywhere, group());
  DistributedDataParallel half_model(local, half);
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    half_model.zero_grad();
    const auto x = batch_of(rank(), step, 4);
    (model.forward(x).sum() + half_model.forward(x).sum()).backward();
    require_equal(grads_of(*everywhere), mean_reference(reference_everywhere, [&](Mlp& plain) {
                    return plain->forward(concatenated(step, 4)).sum();
                  }));
    reference_local->zero_grad();
    for (int r = rank() % 2; r < world(); r += 2) {
      (reference_local->forward(batch_of(r, step, 4)).sum() / half->world_size()).backward();
    }
    require_equal(grads_of(*local), grads_of(*reference_local));
  }
}

TEST_CASE("a forward of one wrapper reduces no local backward of another of the same module") {
  const bool keeps_output = GENERATE(false, true);
  const bool is_weighted = GENERATE(false, true);
  CAPTURE(keeps_output, is_weighted);
  Mlp module, reference;
  DistributedDataParallel logged(module, group());
  DistributedDataParallel trained(module, group());
  const auto backward = [&](int64_t step, double count) {
    const auto loss = trained.forward(batch_of(rank(), step, 4)).sum();
    is_weighted ? trained.weighted_backward(loss, count) : loss.backward();
  };
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    trained.zero_grad();
    auto output = logged.forward(batch_of(rank(), 90 + step, 4));
    if (!keeps_output) {
      output = torch::Tensor();
    }
    {
      const auto local = trained.no_sync();
      backward(2 * step, 3);
    }
    reference->zero_grad();
    loss_of(reference, batch_of(rank(), 2 * step, 4)).backward();
    require_equal(grads_of(*module), grads_of(*reference));
    backward(2 * step + 1, 1);
    auto expected = mean_reference(reference, [&](Mlp& plain) {
      return loss_of(plain, concatenated(2 * step, 4)) +
             loss_of(plain, concatenated(2 * step + 1, 4));
    });
    for (auto& gradient : expected) {
      gradient.div_(is_weighted ? 4 : 1);
    }
    require_equal(grads_of(*module), expected);
  }
}

namespace {

// Two of them may share the trunk.
struct BranchImpl : torch::nn::Module {
  explicit BranchImpl(const torch::Tensor& shared) { trunk = register_parameter("trunk", shared); }
  torch::Tensor forward(const torch::Tensor& x) { return ((trunk + head) * x).sum(); }
  torch::Tensor trunk;
  torch::Tensor head = register_parameter("head", torch::ones({4}, on_device()));
};

}  // namespace

TEST_CASE(
    "a shared parameter and counts: another model's backward is refused only while they wait") {
  const auto trunk = torch::ones({4}, on_device());
  const auto critic = std::make_shared<BranchImpl>(trunk);
  const auto actor = std::make_shared<BranchImpl>(critic->trunk);
  DistributedDataParallel first(critic, group());
  DistributedDataParallel second(actor, group());
  const auto x = torch::full({4}, rank() + 1.0, on_device());
  const double mean = 0.5 * (world() + 1);
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    first.zero_grad();
    second.zero_grad();
    {
      const auto local = first.no_sync();
      first.forward(x);  // logged
    }
    second.forward(x).backward();
    REQUIRE(critic->trunk.grad().eq(mean).all().item<bool>());
    first.weighted_backward(first.forward(x), 1);
    REQUIRE(critic->trunk.grad().eq(2 * mean).all().item<bool>());
    first.zero_grad();
    const bool is_followed = step % 2 == 1;  // by a synchronised forward that waits, too
    {
      const auto local = first.no_sync();
      first.weighted_backward(first.forward(x), 1);
    }
    const auto waiting = is_followed ? first.forward(x) : torch::Tensor();
    REQUIRE_THROWS_WITH(second.forward(x).backward(), Catch::Contains("weighted_backward"));
  }
}

TEST_CASE("shared parameters: gradients that wait for a mean, and a backward without an output") {
  const auto critic = std::make_shared<BranchImpl>(torch::ones({4}, on_device()));
  const auto actor = std::make_shared<BranchImpl>(critic->trunk);
  DistributedDataParallel first(critic, group());
  DistributedDataParallel second(actor, group());
  const auto x = torch::full({4}, rank() + 1.0, on_device());
  const double own = rank() + 1.0;
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    first.zero_grad();
    second.zero_grad();
    {
      const auto local = second.no_sync();
      second.forward(x).backward();
    }
    REQUIRE_THROWS_WITH(first.weighted_backward(first.forward(x), 1),
                        Catch::Contains("weighted_backward while gradients"));
    first.zero_grad();
    first.forward(x).backward();
    {
      const auto local = second.no_sync();
      second.forward(x).backward();  // added to the mean
    }
    REQUIRE_THROWS_WITH(first.weighted_backward(first.forward(x), 1),
                        Catch::Contains("weighted_backward while gradients"));
    first.zero_grad();
    // Whose backward it is cannot be known.
    const auto output = first.forward(x);
    ((critic->trunk * critic->head).sum() * own).backward();
    REQUIRE(critic->trunk.grad().eq(own).all().item<bool>());
    REQUIRE(critic->head.grad().eq(own).all().item<bool>());
    first.zero_grad();
    output.backward();
    REQUIRE(critic->trunk.grad().eq(0.5 * (world() + 1)).all().item<bool>());
  }
}

TEST_CASE("logging data tells buckets, order and times") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(1.0 / (1 << 20)));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
  }
  const auto data = model.logging_data();
  REQUIRE(data.num_parameter_tensors == 6);
  REQUIRE(data.total_parameter_bytes == (20 + 5 + 25 + 5 + 15 + 3) * 4);
  REQUIRE(data.bucket_sizes.size() == 1);
  REQUIRE(data.num_synchronised_backwards == 3);
  REQUIRE(data.can_set_static_graph);
  REQUIRE(data.unused_parameter_size == 0);
  REQUIRE(data.prev_iteration_grad_ready_order_indices.size() == 6);
  REQUIRE(data.avg_backward_compute_time > 0);
  if (world() > 1) {
    REQUIRE(data.has_rebuilt_buckets);
    REQUIRE(data.rebuilt_bucket_sizes.size() == 6);
    REQUIRE(data.rebuilt_per_bucket_param_indices.front() ==
            std::vector<int>{data.prev_iteration_grad_ready_order_indices.front()});
    REQUIRE(data.avg_backward_comm_time > 0);
    REQUIRE(model.exposed_communication_ms() >= 0);
  }
}
