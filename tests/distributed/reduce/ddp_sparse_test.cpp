// SPDX-License-Identifier: Apache-2.0
// ddp.sparse=gather: gradients.
#include "ddp/reduce/join.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/reduce/sparse_models.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("sparse gradients are those of one process with the ids of all ranks") {
  const bool has_dense = GENERATE(true, false);
  for (const double cap : bucket_caps()) {
    for (const std::string mode : {"plain", "find_unused", "static", "fp16_compress"}) {
      CAPTURE(has_dense, cap, mode);
      auto options = gather(cap);
      options.find_unused_parameters = mode == "find_unused";
      options.static_graph = mode == "static";
      if (mode == "fp16_compress") {  // of the dense gradients
        options.comm_hook = CommHookType::Fp16Compress;
      }
      Sides sides(options, has_dense);
      REQUIRE(sparse_parameters(sides.model).size() == 2);
      REQUIRE(dense_parameters(sides.model).size() == (has_dense ? 2 : 0));
      for (int64_t step = 0; step < 4; ++step) {
        CAPTURE(step);
        sides.model.zero_grad();
        sides.loss(step).backward();
        sides.require_mean({step});
      }
    }
  }
}

TEST_CASE("rows are added in the order of the ranks") {
  constexpr int64_t kMany = 199;  // with few, a sort that is not stable keeps their order
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(kMany, 3).sparse(true));
  table->to(context().device());
  DistributedDataParallel model(table, group(), gather());
  // Every rank lacks other ids, and all share more than a half.
  const auto ids = [](int r) {
    const auto all = torch::arange(kMany, on_device().dtype(torch::kLong));
    return all.index({all.remainder(11) != r});
  };
  const auto upstream = [&](int r) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(r));
    return torch::randn({ids(r).numel(), 3}, generator, torch::kFloat).to(context().device());
  };
  (model.forward(ids(rank())) * upstream(rank())).sum().backward();
  auto expected = torch::zeros({kMany, 3}, on_device());
  for (int r = 0; r < world(); ++r) {
    expected.index_add_(0, ids(r), upstream(r));
  }
  const auto& grad = table->weight.grad();
  REQUIRE(grad.is_coalesced());
  REQUIRE(torch::equal(grad.to_dense(), expected / world()));
  const auto mine = fingerprint_of({{"indices", grad.indices()}, {"values", grad.values()}});
  for (const auto& other : context().control_plane().all_gather(mine)) {
    REQUIRE(other == mine);
  }
}

TEST_CASE("the gradient memory holds no rows of a sparse parameter") {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(100000, 8).sparse(true));
  table->to(context().device());
  DistributedDataParallel model(table, group(), gather());
  REQUIRE(model.logging_data().bucket_sizes[0] <= 64 * world());
}

TEST_CASE("sparse gradients of backwards under no_sync add up") {
  Sides sides;
  for (int round = 0; round < 3; ++round) {
    sides.model.zero_grad();
    {
      auto guard = sides.model.no_sync();
      sides.loss(0).backward();
      sides.loss(1).backward();
    }
    sides.loss(2).backward();
    sides.require_mean({0, 1, 2});
  }
}

TEST_CASE("sparse means of several synchronised backwards add up") {
  Sides sides;
  for (int64_t step = 0; step < 3; ++step) {
    sides.loss(step).backward();
  }
  sides.require_mean({0, 1, 2});
}

TEST_CASE("weighted_backward divides sparse gradients by the sum of the counts") {
  const bool on_the_device = GENERATE(true, false);
  Sides sides;
  double total = 0;
  for (int r = 0; r < world(); ++r) {
    total += static_cast<double>(ids_of(r, 1).numel());
  }
  // The second round adds to the mean of the first.
  for (int round = 1; round <= 2; ++round) {
    const auto own_count = ids_of(rank(), 1).numel();
    if (on_the_device) {
      sides.model.weighted_backward(sides.loss(1), torch::full({}, own_count, on_device()));
    } else {
      sides.model.weighted_backward(sides.loss(1), static_cast<double>(own_count));
    }
    auto expected = mean_reference(sides.reference,
                                   [](Tables& plain) { return plain->forward(all_ids(1)).sum(); });
    const auto actual = sides.dense_grads();
    for (size_t i = 0; i < expected.size(); ++i) {
      // The reciprocal of the count is rounded once.
      REQUIRE(torch::allclose(actual[i], expected[i] * (world() * round / total), 1e-6, 1e-6));
    }
    sides.require_same_on_all_ranks();
  }
}

namespace {

struct TwoTablesImpl : torch::nn::Module {
  TwoTablesImpl() {
    for (auto* table : {&first, &second}) {
      *table =
          register_module(table == &first ? "first" : "second",
                          torch::nn::Embedding(torch::nn::EmbeddingOptions(kRows, 4).sparse(true)));
    }
    to(context().device());
  }
  torch::Tensor forward(bool uses_second) {
    const auto ids = torch::tensor({1, 2, 2}, on_device().dtype(torch::kLong));
    return uses_second ? first(ids) + second(ids) : first(ids);
  }
  torch::nn::Embedding first{nullptr}, second{nullptr};
};

}  // namespace

TEST_CASE("a sparse parameter without gradient follows the rules of all parameters") {
  auto options = gather();
  options.find_unused_parameters = true;
  {
    auto module = std::make_shared<TwoTablesImpl>();
    DistributedDataParallel model(module, group(), options);
    model.forward(rank() == 0).sum().backward();  // the other ranks have no rows
    REQUIRE(module->second->weight.grad().to_dense().sum().item<double>() == 12.0 / world());
    const auto before = module->second->weight.grad().to_dense();
    model.forward(false).sum().backward();  // used on no rank: stays as it was
    REQUIRE(torch::equal(module->second->weight.grad().to_dense(), before));
    model.zero_grad();
    model.forward(false).sum().backward();
    REQUIRE(!module->second->weight.grad().defined());
  }
  auto module = std::make_shared<TwoTablesImpl>();
  DistributedDataParallel model(module, group(), gather());
  model.forward(false).sum().backward();
  REQUIRE_THROWS_WITH(model.forward(false), Catch::Contains("without a gradient: second.weight"));
}

TEST_CASE("a dense gradient that one rank assigned is an error on all") {
  auto options = gather();
  options.find_unused_parameters = true;
  auto module = std::make_shared<TwoTablesImpl>();
  DistributedDataParallel model(module, group(), options);
  const bool is_first = rank() == 0;
  if (is_first) {
    module->second->weight.mutable_grad() = torch::ones_like(module->second->weight);
  }
  auto loss = model.forward(!is_first).sum();
  if (world() == 1) {  // used on no rank: stays as it was
    loss.backward();
    REQUIRE(!module->second->weight.grad().is_sparse());
    return;
  }
  REQUIRE_THROWS_WITH(
      loss.backward(),
      Catch::Contains(is_first ? "second.weight is gathered as rows"
                               : "rank 0 has a gradient of parameter second.weight that is not"));
  model.forward(is_first).sum().backward();  // its gradients are those of this backward alone
  REQUIRE(module->second->weight.grad().to_dense().sum().item<double>() == 12.0 / world());
}

TEST_CASE("a hook that throws on one rank leaves no other waiting for its rows") {
  struct Throwing : CommHook {
    std::string name() const override { return "throwing"; }
    void start(GradBucket& bucket) override {
      work = bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Avg);
    }
    void finish(GradBucket&) override {
      work->wait();
      if (rank() == world() - 1) {
        throw std::runtime_error("the hook threw");
      }
    }
    WorkPtr work;
  };
  Sides sides;
  sides.model.register_comm_hook(std::make_shared<Throwing>());
  auto loss = sides.loss(0);
  if (rank() == world() - 1) {
    REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("the hook threw"));
    return;
  }
  loss.backward();
  require_equal(sides.dense_grads(), mean_reference(sides.reference, [](Tables& plain) {
                  return plain->forward(all_ids(0)).sum();
                }));
}

TEST_CASE("a sparse parameter may be frozen between steps") {
  const bool is_weighted = GENERATE(true, false);
  Sides sides;
  sides.loss(0).backward();
  sides.require_mean({0});
  const auto before = sides.module->users->weight.grad().to_dense();
  sides.module->users->weight.set_requires_grad(false);
  if (is_weighted) {  // the mean is set aside meanwhile
    sides.model.weighted_backward(sides.loss(1), 4);
  } else {
    sides.loss(1).backward();
  }
  REQUIRE(torch::equal(sides.module->users->weight.grad().to_dense(), before));
  sides.module->users->weight.set_requires_grad(true);
  // The kept mean is still one, which no count divides.
  sides.model.weighted_backward(sides.loss(2), 2);
  const auto mean = mean_reference(
      sides.reference, [](Tables& plain) { return plain->forward(all_ids(2)).sum(); })[0];
  REQUIRE(torch::equal(sides.module->users->weight.grad().to_dense(), before + mean / 2));
  sides.model.zero_grad();
  sides.loss(2).backward();
  sides.require_mean({2});
}

TEST_CASE("ranks that ran out of inputs have no rows") {
  const bool divides_by_all = GENERATE(true, false);
  Sides sides;
  std::vector<torch::Tensor> last;
  join(sides.model,
       [&] {
         for (int64_t step = 0; step <= rank(); ++step) {
           sides.model.zero_grad();
           sides.loss(2 * step).backward();
           last = sides.dense_grads();
         }
       },
       {.divide_by_initial_world_size = divides_by_all});
  require_equal(sides.dense_grads(), last);  // as before the other ranks went on
  REQUIRE(sides.module->users->weight.grad().is_coalesced());
  // The last rank is alone in its last step, and has the other ranks' rows in no gradient.
  if (rank() == world() - 1) {
    sides.reference->zero_grad();
    sides.reference->forward(ids_of(rank(), 2 * rank())).sum().backward();
    auto expected = grads_of(*sides.reference);
    for (auto& grad : expected) {
      grad.div_(divides_by_all ? world() : 1);
    }
    require_equal(last, expected);
  }
  // The rank's own means are still means.
  sides.model.weighted_backward(sides.loss(0), 1);
  auto sum = mean_reference(sides.reference,
                            [](Tables& plain) { return plain->forward(all_ids(0)).sum(); });
  for (size_t i = 0; i < sum.size(); ++i) {
    sum[i] += last[i];
  }
  require_equal(sides.dense_grads(), sum);
}

TEST_CASE("a loop in which all ranks make all steps has empty batches of ids") {
  Sides sides;
  const auto none = torch::empty({0}, on_device().dtype(torch::kLong));
  int64_t step = 0;
  join(
      sides.model,
      [&](bool has_batch) {
        sides.model.zero_grad();
        const auto ids = has_batch ? ids_of(rank(), 2 * step) : none;
        sides.model.weighted_backward(sides.model.forward(ids).sum(), has_batch ? 1 : 0);
        sides.require_same_on_all_ranks();
        ++step;
      },
      [&] { return step <= rank(); });
  REQUIRE(step == world());
  sides.reference->forward(ids_of(world() - 1, 2 * (world() - 1))).sum().backward();
  require_equal(sides.dense_grads(), grads_of(*sides.reference));
}

TEST_CASE("the step after a backward that threw has exact sparse gradients") {
  Sides sides;
  sides.module->fuses = true;
  for (int64_t step = 0; step < 6; ++step) {
    CAPTURE(step);
    auto loss = sides.loss(step);
    if (step % 2 == 1) {  // its gradients are dropped, with those of before
      Fuse::blows = true;
      REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("the fuse blew"));
      Fuse::blows = false;
      continue;
    }
    loss.backward();
    sides.require_mean({step});
  }
}

TEST_CASE("a GraphedStep runs steps with sparse gradients eagerly") {
  Sides sides;
  GraphedStep step(context(), {.models = {&sides.model}},
                   [&](const torch::Tensor& ids, const StepScalars&) {
                     sides.model.zero_grad();
                     auto loss = sides.model.forward(ids).sum();
                     loss.backward();
                     return std::vector{loss.detach()};
                   });
  for (int64_t i = 0; i < 6; ++i) {
    step(ids_of(rank(), 0), {.lr = 0.1, .step = i});
    sides.require_mean({0});
  }
  REQUIRE(step.counts().captures == 0);
  if (context().device().is_cuda()) {
    REQUIRE_THAT(step.counts().why_eager, Catch::Contains("ddp.sparse=gather reads on the host"));
  }
}
