// SPDX-License-Identifier: Apache-2.0
// Forwards without exactly one backward each, and their effect on the next step.
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// A local and a synchronised step give the mean over both on all ranks, in one reduction.
void require_accumulation_works(DistributedDataParallel<Mlp>& model, Mlp& module, Mlp& reference) {
  const auto passes = num_passes(model);
  model.zero_grad();
  {
    auto guard = model.no_sync();
    loss_of(model, 100).backward();
  }
  REQUIRE(num_passes(model) == passes);
  loss_of(model, 101).backward();
  REQUIRE(num_passes(model) == passes + 1);
  require_equal(grads_of(*module), mean_of_steps(reference, {100, 101}));
}

}  // namespace

TEST_CASE("two forwards with one backward leave nothing for no_sync to trip over") {
  for (const bool find_unused : {false, true}) {
    DdpOptions options;
    options.find_unused_parameters = find_unused;
    Mlp module, reference;
    DistributedDataParallel model(module, group(), options);
    for (int round = 0; round < 2; ++round) {
      model.zero_grad();
      // Both losses and their graphs stay alive: only a backward that reached them counts.
      const auto first = loss_of(model, 2 * round);
      const auto second = loss_of(model, 2 * round + 1);
      (first + second).backward();
      require_equal(grads_of(*module), mean_of_steps(reference, {2 * round, 2 * round + 1}));
      require_accumulation_works(model, module, reference);
    }
  }
}

TEST_CASE("a forward without a backward leaves nothing either") {
  for (const bool find_unused : {false, true}) {
    DdpOptions options;
    options.find_unused_parameters = find_unused;
    Mlp module, reference;
    DistributedDataParallel model(module, group(), options);
    for (int round = 0; round < 2; ++round) {
      loss_of(model, 50 + round);  // skipped, like a non-finite loss
      require_accumulation_works(model, module, reference);
      loss_of(model, 60 + round);
      model.zero_grad();
      loss_of(model, round).backward();
      require_equal(grads_of(*module), mean_of_steps(reference, {round}));
    }
  }
}

TEST_CASE("a synchronised forward without a backward reduces no backward under no_sync()") {
  const bool all_keep_output = GENERATE(false, true);  // else rank 0 alone
  const bool is_weighted = GENERATE(false, true);
  enum class Frozen { Never, LocalBackward, BothBackwards };
  const auto frozen = GENERATE(Frozen::Never, Frozen::LocalBackward, Frozen::BothBackwards);
  CAPTURE(all_keep_output, is_weighted, frozen);
  Mlp module, reference;
  DistributedDataParallel model(module, group(), with_cap(bucket_caps()[1]));
  const auto backward = [&](int64_t step, double count) {
    const auto loss = loss_of(model, step);
    is_weighted ? model.weighted_backward(loss, count) : loss.backward();
  };
  std::vector<torch::Tensor> kept;
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    model.zero_grad();
    const auto logged = loss_of(model, 70 + step);
    if (all_keep_output || rank() == 0) {
      kept.push_back(logged);
    }
    const auto passes = num_passes(model);
    module->third->bias.set_requires_grad(frozen == Frozen::Never);
    {
      const auto local = model.no_sync();
      backward(2 * step, 3);
    }
    CHECK(num_passes(model) == passes);
    module->third->bias.set_requires_grad(frozen != Frozen::BothBackwards);
    backward(2 * step + 1, 1);
    CHECK(num_passes(model) == passes + 1);
    module->third->bias.set_requires_grad(true);
    auto expected = mean_of_steps(reference, {2 * step, 2 * step + 1});
    if (frozen != Frozen::Never) {
      expected.back() = frozen == Frozen::LocalBackward
                            ? mean_of_steps(reference, {2 * step + 1}).back()
                            : torch::Tensor();
    }
    for (auto& gradient : expected) {
      if (gradient.defined()) {
        gradient.div_(is_weighted ? 4 : 1);
      }
    }
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("a second backward that cannot be reduced is refused, not taken for a local one") {
  for (const bool static_graph : {false, true}) {
    DdpOptions options;
    options.find_unused_parameters = !static_graph;
    options.static_graph = static_graph;
    Mlp module;
    DistributedDataParallel model(module, group(), options);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      loss_of(model, step).backward();
    }
    auto first = loss_of(model, 3);
    auto second = loss_of(model, 4);
    first.backward();
    REQUIRE_THROWS_WITH(second.backward(), Catch::Contains("sum the losses"));
  }
}

TEST_CASE("find_unused_parameters without outputs is refused") {
  DdpOptions options;
  options.find_unused_parameters = true;
  Mlp module;
  DistributedDataParallel model(module, group(), options);
  REQUIRE_THROWS_WITH(model.prepare_for_backward(), Catch::Contains("needs the outputs"));
  const auto loss = module->forward(batch_of(rank(), 0, 4)).sum();
  model.prepare_for_backward({loss});
  loss.backward();
}

TEST_CASE("one rank may evaluate by itself") {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      linear = register_module("linear", torch::nn::Linear(4, 3));
      norm = register_module("norm", torch::nn::BatchNorm1d(3));
      to(context().device());
    }
    torch::Tensor forward(const torch::Tensor& x) { return norm(linear(x)); }
    torch::nn::Linear linear{nullptr};
    torch::nn::BatchNorm1d norm{nullptr};
  };
  auto net = std::make_shared<NetImpl>();
  DistributedDataParallel model(net, group());
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).square().sum().backward();
    if (rank() == 0) {
      const torch::NoGradGuard no_grad;
      net->eval();
      model.forward(batch_of(rank(), step, 4));
      net->train();
    }
  }
  // Every step began with rank 0's statistics, so only the last step's batches differ.
  model.sync_buffers();
  auto largest = net->norm->running_mean.clone();
  auto smallest = net->norm->running_mean.clone();
  group()->all_reduce(largest, ReduceOp::Max)->wait();
  group()->all_reduce(smallest, ReduceOp::Min)->wait();
  REQUIRE(torch::equal(largest, smallest));
}

TEST_CASE("weighted steps add up over gradients that are means already") {
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  model.zero_grad();
  auto expected = grads_of(*reference);
  for (int step = 0; step < 3; ++step) {
    // 3 items per rank and step with weights 1, 2, …, because a ragged batch may have any count.
    const double count = rank() + 1;
    model.weighted_backward(loss_of(model, step) * count, count);
    reference->zero_grad();
    double total = 0;
    for (int r = 0; r < world(); ++r) {
      (reference->forward(batch_of(r, step, 4)).sum() * (r + 1)).backward();
      total += r + 1;
    }
    const auto grads = grads_of(*reference);
    for (size_t i = 0; i < grads.size(); ++i) {
      const auto mean = grads[i] / total;
      expected[i] = expected[i].defined() ? expected[i] + mean : mean;
    }
    const auto actual = grads_of(*module);
    for (size_t i = 0; i < actual.size(); ++i) {
      REQUIRE(torch::allclose(actual[i], expected[i], 1e-5, 1e-5));
    }
  }
}

namespace {

// Uses the sum of the counts in start(), in one group with other buckets.
class GroupedCountHook : public CommHook {
 public:
  std::string name() const override { return "grouped_count"; }
  bool starts_in_group() const override { return true; }
  bool reads_count() const override { return true; }
  void start(GradBucket& bucket) override {
    bucket.buffer.mul_(bucket.inverse_count);
    works_.push_back(bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Sum));
  }
  void finish(GradBucket& bucket) override {
    works_.at(static_cast<size_t>(bucket.index))->wait();
    if (bucket.is_last) {
      works_.clear();
    }
  }

 private:
  std::vector<WorkPtr> works_;
};

}  // namespace

TEST_CASE("a hook of the user's takes part in a weighted mean") {
  const bool reads_count = GENERATE(false, true);
  Mlp module, reference;
  DistributedDataParallel model(module, group(), with_cap(bucket_caps()[1]));
  if (reads_count) {
    model.register_comm_hook(std::make_shared<GroupedCountHook>());
  } else {
    model.register_comm_hook(make_function_hook("mean", [](GradBucket& bucket) {
      bucket.buffer.div_(bucket.divisor);
      return bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Sum);
    }));
  }
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    model.weighted_backward(loss_of(model, step), 3);
    auto expected = mean_of_steps(reference, {step});
    const auto actual = grads_of(*module);
    for (size_t i = 0; i < actual.size(); ++i) {
      REQUIRE(torch::allclose(actual[i], expected[i] / 3, 1e-5, 1e-6));
    }
  }
}

TEST_CASE("inside a join one backward follows each forward") {
  Mlp module;
  DistributedDataParallel model(module, group());
  REQUIRE_THROWS_AS(join(model,
                         [&] {
                           const auto first = loss_of(model, 0);
                           const auto second = loss_of(model, 1);
                           (first + second).backward();
                         }),
                    SettingsError);
}

TEST_CASE("after a join, ranks that ended inside an accumulation agree about rank 0's buffers") {
  torch::nn::Sequential module(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  module->to(context().device());
  DistributedDataParallel model(module, group());
  const int num_batches = rank() == 0 ? 4 : 3;  // the other ranks end with a local one
  for (int round = 0; round < 2; ++round) {
    join(model, [&] {
      for (int i = 0; i < num_batches; ++i) {
        std::optional<NoSync> no_sync;
        if (i % 2 == 0) {
          no_sync.emplace(model);
        }
        model.forward(batch_of(rank(), i, 4)).sum().backward();
      }
    });
    model.zero_grad();
    model.forward(batch_of(rank(), 9, 4)).sum().backward();
    for (const auto& buffer : module->buffers()) {
      CHECK(buffer.isfinite().all().item<bool>());
    }
  }
}

TEST_CASE("a join and its loop have to agree about weights") {
  Mlp module;
  DistributedDataParallel model(module, group());
  REQUIRE_THROWS_WITH(join(model, [&] { model.weighted_backward(loss_of(model, 0), 3); }),
                      Catch::Contains("JoinOptions::weighted=true"));
  JoinOptions options;
  options.weighted = true;
  Mlp other;
  DistributedDataParallel weighted(other, group());
  REQUIRE_THROWS_WITH(join(
                          weighted, [&] { loss_of(weighted, 0).backward(); }, options),
                      Catch::Contains("weighted_backward"));
}

TEST_CASE("ignored tensors are part of the model's state, each rank's own") {
  Mlp module(3);
  DdpOptions options;
  options.parameters_to_ignore = {"first.weight"};
  DistributedDataParallel model(module, group(), options);
  {
    const torch::NoGradGuard no_grad;
    module->first->weight.fill_(rank() + 10);
  }
  const auto saved = model.state_dict();
  StateDict kept;
  for (const auto& [name, tensor] : saved.tensors) {
    kept.tensors.emplace(name, tensor.clone());
  }
  REQUIRE(kept.tensors.contains("first.weight"));
  REQUIRE(kept.tensors.contains("rank_local.first.weight") == (world() > 1));
  kept.tensors.at("first.weight").fill_(10);  // as in a file: rank 0's
  {
    const torch::NoGradGuard no_grad;
    module->first->weight.zero_();
  }
  model.load_state_dict(kept);
  REQUIRE(module->first->weight.eq(rank() + 10).all().item<bool>());
  kept.tensors.erase("rank_local.first.weight");  // saved by another number of ranks
  model.load_state_dict(kept);
  REQUIRE(module->first->weight.eq(10).all().item<bool>());
}

TEST_CASE("PowerSGD shrinks channels_last gradients too") {
  torch::nn::Sequential net(torch::nn::Conv2d(16, 32, 3));
  net->to(context().device());
  for (auto& parameter : net->parameters()) {
    if (parameter.dim() == 4) {
      parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  DdpOptions options;
  options.comm_hook = CommHookType::PowerSgd;
  options.powersgd_start_step = 0;
  options.powersgd_rank = 1;
  DistributedDataParallel model(net, group(), options);
  const auto x = torch::ones({2, 16, 5, 5}, on_device());
  model.forward(x).sum().backward();
  // Equal rows on equal data give a matrix of rank one, which its factors represent exactly.
  const auto grad = net->parameters()[0].grad();
  REQUIRE(torch::allclose(grad, torch::full_like(grad, 2.0 * 9), 1e-4, 1e-3));
}
