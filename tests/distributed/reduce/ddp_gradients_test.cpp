// SPDX-License-Identifier: Apache-2.0
// Gradients compared with one process on the concatenated batch.
#include "distributed/ddp_test_utils.hpp"
#include "reduce/reducer.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("gradients are the mean over the ranks in every step, before and after the rebuild") {
  for (const double cap : bucket_caps()) {
    for (const bool static_graph : {false, true}) {
      for (const bool find_unused : {false, true}) {
        CAPTURE(cap, static_graph, find_unused);
        auto options = with_cap(cap);
        options.static_graph = static_graph;
        options.find_unused_parameters = find_unused;
        Mlp module;
        Mlp reference;
        DistributedDataParallel model(module, group(), options);
        for (int step = 0; step < 5; ++step) {
          model.zero_grad();
          model.forward(batch_of(rank(), step, 4)).sum().backward();
          require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                          return loss_of(plain, concatenated(step, 4));
                        }));
        }
        const bool rebuilds = world() > 1 && (static_graph || !find_unused);
        REQUIRE(model.logging_data().has_rebuilt_buckets == rebuilds);
      }
    }
  }
}

TEST_CASE("the gradients are views of the buckets and keep the parameters' strides") {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 8, 3));
  conv->to(context().device());
  conv->weight.set_data(conv->weight.to(at::MemoryFormat::ChannelsLast));
  DistributedDataParallel model(conv, group());
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(torch::ones({2, 4, 5, 5}, on_device())).sum().backward();
    REQUIRE(conv->weight.grad().strides() == conv->weight.strides());
    REQUIRE(conv->weight.grad().is_alias_of(model.reducer().gradients().bucket(0).buffer));
  }
}

TEST_CASE("zero_grad of anyone leaves the next step right") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  torch::optim::SGD optimizer(module->parameters(), 0.0);
  for (int step = 0; step < 6; ++step) {
    switch (step % 3) {
      case 0:
        model.zero_grad();
        break;
      case 1:
        optimizer.zero_grad();
        break;
      default:
        optimizer.zero_grad(/*set_to_none=*/false);
        break;
    }
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                    return loss_of(plain, concatenated(step, 4));
                  }));
  }
}

TEST_CASE("backward without zero_grad adds the mean to the mean") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  reference->zero_grad();
  for (int step = 0; step < 3; ++step) {
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    (loss_of(reference, concatenated(step, 4)) / world()).backward();
    require_equal(grads_of(*module), grads_of(*reference));
  }
}

TEST_CASE("no_sync steps and one synchronised step equal one step on everything") {
  for (const double cap : bucket_caps()) {
    for (const bool static_graph : {false, true}) {
      for (const bool find_unused : {false, true}) {
        CAPTURE(cap, static_graph, find_unused);
        auto options = with_cap(cap);
        options.static_graph = static_graph;
        options.find_unused_parameters = find_unused;
        Mlp module;
        Mlp reference;
        DistributedDataParallel model(module, group(), options);
        for (int round = 0; round < 4; ++round) {
          model.zero_grad();
          reference->zero_grad();
          for (int micro = 0; micro < 3; ++micro) {
            const int step = 10 * round + micro;
            if (micro < 2) {
              auto guard = model.no_sync();
              model.forward(batch_of(rank(), step, 4)).sum().backward();
            } else {
              model.forward(batch_of(rank(), step, 4)).sum().backward();
            }
            (loss_of(reference, concatenated(step, 4)) / world()).backward();
          }
          require_equal(grads_of(*module), grads_of(*reference));
        }
      }
    }
  }
}

TEST_CASE("no_sync sends nothing, nests and is restored by an exception") {
  Mlp module;
  Mlp local;
  DistributedDataParallel model(module, group());
  model.zero_grad();
  try {
    auto outer = model.no_sync();
    { auto inner = model.no_sync(); }
    model.forward(batch_of(rank(), 0, 4)).sum().backward();
    throw std::runtime_error("leave");
  } catch (const std::runtime_error&) {
  }
  local->zero_grad();
  loss_of(local, batch_of(rank(), 0, 4)).backward();
  require_equal(grads_of(*module), grads_of(*local));
  REQUIRE(model.logging_data().num_synchronised_backwards == 0);

  model.zero_grad();
  model.forward(batch_of(rank(), 1, 4)).sum().backward();
  REQUIRE(model.logging_data().num_synchronised_backwards == 1);
}

TEST_CASE("a NoSync may move, and ends with its last owner, in any order") {
  Mlp module;
  DistributedDataParallel model(module, group());
  auto first = std::make_optional(model.no_sync());
  std::optional<NoSync> second;
  second = model.no_sync();
  first.reset();
  REQUIRE_FALSE(model.require_backward_grad_sync());
  first = std::move(*second);
  REQUIRE_FALSE(model.require_backward_grad_sync());
  second.reset();
  REQUIRE_FALSE(model.require_backward_grad_sync());
  first = model.no_sync();  // the old one ends behind the new one's start
  REQUIRE_FALSE(model.require_backward_grad_sync());
  first.reset();
  REQUIRE(model.require_backward_grad_sync());
}

TEST_CASE("ragged batches give the gradient of the global mean") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group(), with_cap(1.0 / (1 << 20)));
  // Counts from the host, from the device, and from both in one step.
  const auto add = [&](const torch::Tensor& loss_sum, int64_t count, bool of_device) {
    if (of_device) {
      model.weighted_backward(loss_sum, torch::full({}, count, on_device().dtype(torch::kLong)));
    } else {
      model.weighted_backward(loss_sum, static_cast<double>(count));
    }
  };
  for (int step = 0; step < 5; ++step) {
    model.zero_grad();
    // Rank r has 2r items (with several ranks, rank 0 has none) in the synchronised micro-batch and
    // one in the unsynchronised one. Totals are powers of two, so that division is exact: see
    // `items`.
    const std::vector<int64_t> items = world() == 1   ? std::vector<int64_t>{3}
                                       : world() == 2 ? std::vector<int64_t>{0, 6}
                                                      : std::vector<int64_t>{0, 1, 5, 6};
    {
      auto guard = model.no_sync();
      add(model.forward(batch_of(rank(), 2 * step, 4, 1)).sum(), 1, step % 2 == 1);
    }
    const int64_t mine = items[static_cast<size_t>(rank())];
    auto x = batch_of(rank(), 2 * step + 1, 4, 6).narrow(0, 0, mine);
    add(model.forward(x).sum(), mine, step == 1 || step == 2);

    std::vector<torch::Tensor> all{concatenated(2 * step, 4, 1)};
    int64_t total = world();
    for (int r = 0; r < world(); ++r) {
      all.push_back(batch_of(r, 2 * step + 1, 4, 6).narrow(0, 0, items[static_cast<size_t>(r)]));
      total += items[static_cast<size_t>(r)];
    }
    reference->zero_grad();
    loss_of(reference, torch::cat(all)).backward();
    auto expected = grads_of(*reference);
    for (auto& grad : expected) {
      grad.div_(static_cast<double>(total));  // 4, 8 or 16: exact
    }
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("one buffer may hold the counts of all micro-steps") {
  const auto dtype = GENERATE(torch::kFloat, torch::kLong);
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  const auto count = torch::zeros({}, on_device().dtype(dtype));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    {
      const auto local = model.no_sync();
      count.fill_(1);
      model.weighted_backward(model.forward(batch_of(rank(), 10 + step, 4)).sum(), count);
    }
    count.fill_(3);
    model.weighted_backward(model.forward(batch_of(rank(), step, 4)).sum(), count);
    count.fill_(1000);
    const auto expected = mean_reference(reference, [&](Mlp& plain) {
      return (plain->forward(concatenated(10 + step, 4)).sum() +
              plain->forward(concatenated(step, 4)).sum()) /
             4;
    });
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("zero_grad of anyone drops counts that wait and means that were set aside") {
  const int who = GENERATE(0, 1, 2);
  const bool is_weighted = GENERATE(true, false);
  const bool clears_after_forward = GENERATE(true, false);
  const bool has_mean = GENERATE(true, false);  // it is set aside by the count
  if (clears_after_forward && !is_weighted) {
    return;  // only a forward or a weighted_backward looks
  }
  CAPTURE(who, is_weighted, clears_after_forward, has_mean);
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  torch::optim::SGD optimizer(module->parameters(), 0.0);
  const auto clear = [&] {
    if (who == 0) {
      model.zero_grad();
    } else if (who == 1) {
      optimizer.zero_grad();
    } else {
      module->zero_grad();
    }
  };
  if (has_mean) {
    model.forward(batch_of(rank(), 0, 4)).sum().backward();
  }
  {
    const auto local = model.no_sync();
    model.weighted_backward(model.forward(batch_of(rank(), 1, 4)).sum(), 4);
  }
  if (!clears_after_forward) {
    clear();
  }
  const auto loss = model.forward(batch_of(rank(), 2, 4)).sum();
  if (clears_after_forward) {
    clear();
  }
  if (is_weighted) {
    model.weighted_backward(loss, 4);
  } else {
    loss.backward();
  }
  const auto expected = mean_reference(reference, [&](Mlp& plain) {
    return loss_of(plain, concatenated(2, 4)) / (is_weighted ? 4 : 1);
  });
  require_equal(grads_of(*module), expected);
}

TEST_CASE("a float64 model has weighted means of float64, with hooks too") {
  const auto hook = GENERATE(CommHookType::None, CommHookType::AllReduce);
  auto weight = torch::zeros({5}, on_device().dtype(torch::kDouble)).requires_grad_();
  DataParallelModel model({.parameters = {{"weight", weight}}}, group(), {.comm_hook = hook});
  for (const double count : {3.0, 7.0}) {
    model.zero_grad();
    const auto loss = weight.sum() * (rank() + 1);
    model.prepare_for_backward({loss});
    model.weighted_backward(loss, torch::full({}, count, on_device()));
    const double mean = (world() + 1) / (2 * count);
    CHECK(torch::allclose(weight.grad(), torch::full_like(weight, mean), 4e-16, 0));
  }
}

TEST_CASE("a count that is no number is refused, or makes the gradient NaN") {
  Mlp module;
  DistributedDataParallel model(module, group());
  for (const double count : {-1.0, double{NAN}, double{INFINITY}}) {
    const auto loss = model.forward(batch_of(rank(), 0, 4)).sum();
    CHECK_THROWS_WITH(model.weighted_backward(loss, count), Catch::Contains("count="));
  }
  model.weighted_backward(model.forward(batch_of(rank(), 0, 4)).sum(),
                          torch::full({}, rank() == 0 ? double{NAN} : 1.0, on_device()));
  for (const auto& grad : grads_of(*module)) {
    CHECK(grad.isnan().all().item<bool>());
  }
}

TEST_CASE("a weighted step without a single item leaves zero gradients") {
  Mlp module;
  DistributedDataParallel model(module, group());
  model.zero_grad();
  model.weighted_backward(model.forward(torch::zeros({0, 4}, on_device())).sum(), 0);
  for (const auto& grad : grads_of(*module)) {
    REQUIRE(torch::equal(grad, torch::zeros_like(grad)));
  }
  REQUIRE_THROWS_AS(model.weighted_backward(torch::zeros({}), -1), SettingsError);
  REQUIRE_THROWS_WITH(model.weighted_backward(torch::zeros({}), torch::ones({2}, on_device())),
                      Catch::Contains("one element"));
}

TEST_CASE("bf16 parameters keep float32 gradients over many micro-steps") {
  Mlp module;
  module->to(torch::kBFloat16);
  DistributedDataParallel model(module, group());
  model.zero_grad();
  // 257 gradients of 1 sum to 257, which bf16 cannot represent (it would stop at 256).
  constexpr int kSteps = 257;
  for (int step = 0; step < kSteps; ++step) {
    const bool last = step + 1 == kSteps;
    std::optional<NoSync> guard;
    if (!last) {
      guard.emplace(model);
    }
    model.forward(torch::zeros({1, 4}, on_device().dtype(torch::kBFloat16))).sum().backward();
  }
  REQUIRE(module->third->bias.grad().scalar_type() == torch::kFloat);
  REQUIRE(torch::equal(module->third->bias.grad(), torch::full({3}, 257.0, on_device())));
}

TEST_CASE("with fp32_grads off half parameters keep half gradients") {
  Mlp module;
  module->to(torch::kBFloat16);
  DdpOptions options;
  options.fp32_grads = false;
  DistributedDataParallel model(module, group(), options);
  model.forward(batch_of(rank(), 0, 4).to(torch::kBFloat16)).sum().backward();
  REQUIRE(module->third->bias.grad().scalar_type() == torch::kBFloat16);
}

TEST_CASE("world size 1 equals the plain module") {
  Mlp module;
  Mlp plain;
  DistributedDataParallel model(module, make_single_communicator(context().device()));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    plain->zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    plain->forward(batch_of(rank(), step, 4)).sum().backward();
    require_equal(grads_of(*module), grads_of(*plain));
  }
}
