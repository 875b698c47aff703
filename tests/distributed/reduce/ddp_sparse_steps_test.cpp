// SPDX-License-Identifier: Apache-2.0
// ddp.sparse=gather: whole steps, and what is refused.
#include <cmath>
#include <limits>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/reduce/sparse_models.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("GradScaler and clip_grad_norm_ treat rows as the dense gradient that they are") {
  Sides sides;
  GradScaler scaler({.grad_scaling = GradScaling::On, .init_scale = 64});
  auto rows = make_sparse_optimizer(sides.model, {.rule = SparseRule::Sgd});
  auto dense = make_optimizer(dense_parameters(sides.model), {});
  scaler.scale(sides.loss(0)).backward();
  scaler.unscale_(*rows);
  scaler.unscale_(*dense);
  sides.require_mean({0});
  double square = 0;
  for (const auto& grad : sides.dense_grads()) {
    square += grad.square().sum().item<double>();
  }
  REQUIRE(rows->scan_gradients().found_inf.item<double>() == 0);
  REQUIRE(clip_grad_norm_(sides.model, 0.5).item<double>() == Approx(std::sqrt(square)));
  REQUIRE(clip_grad_norm_(sides.model, 0).item<double>() == Approx(0.5));
  const auto before = sides.module->users->weight.detach().clone();
  scaler.step(*rows, 1.0);
  scaler.step(*dense, 1.0);
  scaler.update();
  REQUIRE(torch::allclose(sides.module->users->weight.detach(),
                          before - sides.module->users->weight.grad().to_dense()));
  // An inf in a row on one rank skips the step on all.
  sides.model.zero_grad();
  auto loss = sides.loss(2);
  scaler.scale(rank() == 0 ? loss * std::numeric_limits<float>::infinity() : loss).backward();
  const auto kept = sides.module->users->weight.detach().clone();
  scaler.step(*rows, 1.0);
  REQUIRE(torch::equal(sides.module->users->weight.detach(), kept));
}

TEST_CASE("a wrapped optimizer that takes no sparse gradients names the table and the fix") {
  Sides sides;
  const std::vector<at::Tensor> tables{sides.module->users->weight, sides.module->items->weight};
  const std::vector<std::shared_ptr<torch::optim::Optimizer>> refused{
      std::make_shared<torch::optim::SGD>(tables, torch::optim::SGDOptions(0.1).momentum(0.9)),
      std::make_shared<torch::optim::SGD>(tables, torch::optim::SGDOptions(0.1).weight_decay(0.1)),
      std::make_shared<torch::optim::Adam>(tables)};
  for (const auto& plain : refused) {
    sides.model.zero_grad();
    sides.loss(0).backward();
    const auto optimizer = wrap_optimizer(plain, sides.model.named_parameters());
    REQUIRE_THROWS_WITH(optimizer->step(),
                        Catch::Contains("the gradient of users.weight is sparse") &&
                            Catch::Contains("make_sparse_optimizer"));
  }
}

TEST_CASE("twenty steps equal those of torch with dense gradients") {
  const std::string rule = GENERATE("sgd", "wrapped sgd", "adagrad");
  CAPTURE(rule);
  Sides sides;
  {
    const torch::NoGradGuard no_grad;
    for (auto& module : {sides.module, sides.reference}) {
      for (auto& parameter : module->parameters()) {
        parameter.div_(8);
      }
    }
  }
  const double lr = rule == "adagrad" ? 0.25 : 1.0 / 256;
  std::unique_ptr<Optimizer> rows;
  std::unique_ptr<torch::optim::Optimizer> plain;
  if (rule == "adagrad") {
    rows = make_sparse_optimizer(sides.model, {.rule = SparseRule::Adagrad});
    plain = std::make_unique<torch::optim::Adagrad>(sides.reference->parameters(),
                                                    torch::optim::AdagradOptions(lr));
  } else {
    rows = rule == "sgd" ? make_sparse_optimizer(sides.model, {.rule = SparseRule::Sgd})
                         : wrap_optimizer(std::make_shared<torch::optim::SGD>(
                                              std::vector<at::Tensor>{sides.module->users->weight,
                                                                      sides.module->items->weight},
                                              torch::optim::SGDOptions(lr)),
                                          sides.model.named_parameters());
    plain = std::make_unique<torch::optim::SGD>(sides.reference->parameters(),
                                                torch::optim::SGDOptions(lr));
  }
  std::vector<at::Tensor> dense_tensors;
  for (const auto& parameter : dense_parameters(sides.model)) {
    dense_tensors.push_back(parameter.tensor);
  }
  const auto dense = rule == "adagrad"
                         ? wrap_optimizer(std::make_shared<torch::optim::Adagrad>(
                                              dense_tensors, torch::optim::AdagradOptions(lr)),
                                          sides.model.named_parameters())
                         : wrap_optimizer(std::make_shared<torch::optim::SGD>(
                                              dense_tensors, torch::optim::SGDOptions(lr)),
                                          sides.model.named_parameters());
  for (int64_t step = 0; step < 20; ++step) {
    CAPTURE(step);
    sides.model.zero_grad();
    auto loss = sides.model.forward(ids_of(rank(), step)).square().sum();
    loss.backward();
    rows->step(lr);
    dense->step(lr);
    plain->zero_grad();
    auto expected = sides.reference->forward(all_ids(step)).square().sum() / world();
    expected.backward();
    plain->step();
    auto total = loss.detach() / world();
    group()->all_reduce(total)->wait();
    REQUIRE(total.item<double>() == Approx(expected.item<double>()).epsilon(1e-4));
  }
  // Sums over the ranks are in another order than those of one batch.
  const auto expected = sides.reference->parameters();
  const auto actual = sides.module->parameters();
  for (size_t i = 0; i < actual.size(); ++i) {
    REQUIRE(torch::allclose(actual[i], expected[i], 1e-4, 1e-5));
  }
}

TEST_CASE("uses of sparse gradients that cannot be are refused by name") {
  SECTION("without the setting") {
    Tables module(true);
    DistributedDataParallel model(module, group());
    auto loss = model.forward(ids_of(rank(), 0)).sum();
    REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains(".weight got a sparse gradient") &&
                                             Catch::Contains("ddp.sparse=refuse") &&
                                             Catch::Contains("set ddp.sparse=gather"));
  }
  SECTION("dense and sparse gradients of one parameter") {
    Tables module(true);
    DistributedDataParallel model(module, group(), gather());
    {
      auto guard = model.no_sync();
      model.forward(ids_of(rank(), 0)).sum().backward();
    }
    auto loss = model.forward(ids_of(rank(), 0)).sum() + module->users->weight.square().sum();
    REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("users.weight is gathered as rows") &&
                                             Catch::Contains("dense gradient"));
    model.forward(ids_of(rank(), 0)).sum().backward();  // after all ranks caught the error
    REQUIRE(module->users->weight.grad().is_coalesced());
  }
  SECTION("a parameter that no module names") {
    auto table = torch::zeros({kRows, 4}, on_device().requires_grad(true));
    const auto make_loss = [&] {
      return torch::embedding(table, ids_of(rank(), 0), -1, false, /*sparse=*/true).sum();
    };
    {
      DataParallelModel model(ModelTensors{.parameters = {{"table", table}}}, group(), gather());
      const auto loss = make_loss();
      model.prepare_for_backward({loss});
      REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("parameter table") &&
                                               Catch::Contains("ModelTensors::sparse_parameters"));
    }
    table.mutable_grad() = torch::Tensor();
    DataParallelModel model(
        ModelTensors{.parameters = {{"table", table}}, .sparse_parameters = {"table"}}, group(),
        gather());
    const auto loss = make_loss();
    model.prepare_for_backward({loss});
    loss.backward();
    REQUIRE(table.grad().is_coalesced());
  }
  SECTION("names that are no tables") {
    const auto wrap = [](const std::string& name, const std::vector<std::string>& ignored = {}) {
      const auto trained = on_device().requires_grad(true);
      auto options = gather();
      options.parameters_to_ignore = ignored;
      DataParallelModel({.parameters = {{"table", torch::zeros({kRows, 4}, trained)},
                                        {"scale", torch::zeros({}, trained)},
                                        {"frozen", torch::zeros({kRows, 4}, on_device())}},
                         .sparse_parameters = {name}},
                        group(), options);
    };
    REQUIRE_THROWS_WITH(wrap("tabel"), Catch::Contains("sparse_parameters names tabel") &&
                                           Catch::Contains("not in ModelTensors::parameters"));
    REQUIRE_THROWS_WITH(wrap("scale"), Catch::Contains("names scale, which is a scalar"));
    REQUIRE_NOTHROW(wrap("frozen"));
    REQUIRE_NOTHROW(wrap("scale", {"scale"}));
  }
  SECTION("half precision") {
    Tables module(true, true, at::kBFloat16);
    REQUIRE_THROWS_WITH(
        DistributedDataParallel(module, group(), gather()),
        Catch::Contains("parameter users.weight has sparse gradients of BFloat16") &&
            Catch::Contains("allowed are float32 and float64"));
  }
  SECTION("ZeRO-1") {
    Sides sides;
    OptimizerOptions options;
    options.zero1 = true;
    REQUIRE_THROWS_WITH(make_optimizer(sides.model, options),
                        Catch::Contains("optimizer.zero1=true: with ddp.sparse=gather") &&
                            Catch::Contains("parameter users.weight"));
  }
  SECTION("dense optimizers") {
    Sides sides;
    auto optimizer = make_optimizer(sides.model, {});
    sides.loss(0).backward();
    REQUIRE_THROWS_WITH(optimizer->step(0.1), Catch::Contains("users.weight is sparse") &&
                                                  Catch::Contains("make_sparse_optimizer"));
  }
  SECTION("two models") {
    Tables module(true);
    DistributedDataParallel first(module, group(), gather());
    DistributedDataParallel second(module, group(), gather());
    REQUIRE_THROWS_WITH(
        second.forward(ids_of(rank(), 0)),
        Catch::Contains("users.weight has sparse gradients and belongs to several"));
  }
  SECTION("nothing sparse") {
    Tables module(false);
    DistributedDataParallel model(module, group(), gather());
    REQUIRE_THROWS_WITH(make_sparse_optimizer(model, {}),
                        Catch::Contains("no parameter has sparse gradients"));
  }
}

TEST_CASE("ranks whose embeddings differ in sparse are refused at construction") {
  if (world() == 1) {
    return;
  }
  Tables module(rank() == 0);
  REQUIRE_THROWS_AS(DistributedDataParallel(module, group(), gather()), MismatchError);
}
