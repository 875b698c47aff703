// SPDX-License-Identifier: Apache-2.0
// An exported module under data-parallel training: the same numbers as one process on the
// concatenated batch, and captured steps with the bits of eager ones.
#include "ddp/export/exported_module.hpp"

#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"

using namespace ddp;
using namespace ddp::test;
using export_test::ArchiveBuilder;
using export_test::integer;
using export_test::number;
using export_test::symbol;
using export_test::tensor;
using export_test::truth;
using testing::message_of;

namespace {

using Parts = std::vector<std::pair<std::string, export_test::Json>>;

// third(relu(second(relu(first(x))))) with integers, and a parameter that nothing uses.
ArchiveBuilder mlp(bool has_unused) {
  ArchiveBuilder archive;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
      {"first", {5, 4}}, {"second", {5, 5}}, {"third", {3, 5}}};
  int64_t seed = 1;
  for (const auto& [name, shape] : shapes) {
    archive.parameter(name + ".weight", integers(shape, seed++).cpu());
    archive.parameter(name + ".bias", integers({shape[0]}, seed++).cpu());
  }
  if (has_unused) {
    archive.parameter("unused", at::ones({2}));
  }
  archive.input("x", {symbol("s0"), integer(4)});
  std::string value = "x";
  for (const auto& [name, shape] : shapes) {
    archive.node("torch.ops.aten.linear.default",
                 Parts{{"input", tensor(value)},
                       {"weight", tensor("p_" + name + "_weight")},
                       {"bias", tensor("p_" + name + "_bias")}},
                 {tensor(name + "_out")});
    archive.node("torch.ops.aten.relu.default", Parts{{"self", tensor(name + "_out")}},
                 {tensor(name + "_relu")});
    value = name + "_relu";
  }
  archive.output(tensor("third_out"));
  return archive;
}

Parts norm_arguments() {
  return {{"input", tensor("x")},
          {"weight", tensor("p_norm_weight")},
          {"bias", tensor("p_norm_bias")},
          {"running_mean", tensor("b_norm_running_mean")},
          {"running_var", tensor("b_norm_running_var")},
          {"training", truth(true)},
          {"momentum", number(0.25)},
          {"eps", number(1e-5)}};
}

// Batch normalization of x [batch, 4].
ArchiveBuilder batch_norm() {
  ArchiveBuilder archive;
  archive.parameter("norm.weight", at::full({4}, 2.0F)).parameter("norm.bias", at::ones({4}));
  archive.buffer("norm.running_mean", at::zeros({4})).buffer("norm.running_var", at::ones({4}));
  archive.buffer("norm.num_batches_tracked", at::zeros({}, at::kLong));
  archive.input("x", {symbol("s0"), integer(4)});
  archive.node("torch.ops.aten.add_.Tensor",
               Parts{{"self", tensor("b_norm_num_batches_tracked")}, {"other", integer(1)}},
               {tensor("counted")});
  auto arguments = norm_arguments();
  arguments.emplace_back("cudnn_enabled", truth(false));
  archive.node("torch.ops.aten.batch_norm.default", arguments, {tensor("y")});
  archive.output(tensor("y"));
  return archive;
}

ExportedModule on_device(const ArchiveBuilder& archive) {
  auto module = export_test::load(archive);
  module->to(context().device());
  return module;
}

std::shared_ptr<ExportedModuleImpl> copy_of(ExportedModule& module) {
  return std::dynamic_pointer_cast<ExportedModuleImpl>(module->clone());
}

void check_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    CAPTURE(i);
    REQUIRE(a[i].defined() == b[i].defined());
    CHECK((!a[i].defined() || torch::equal(a[i], b[i])));
  }
}

}  // namespace

TEST_CASE("gradients of an exported module are those of one process") {
  auto module = on_device(mlp(false));
  const auto plain = copy_of(module);
  DistributedDataParallel model(module, group(), with_cap(0.0001));
  for (int64_t step = 0; step < 2; ++step) {
    module->zero_grad();
    plain->zero_grad();
    model.forward(batch_of(rank(), step, 4)).toTensor().sum().backward();
    (plain->forward(concatenated(step, 4)).toTensor().sum() / world()).backward();
    check_equal(grads_of(*module), grads_of(*plain));
  }
}

TEST_CASE("frozen and unused parameters, and no_sync, of an exported module") {
  auto module = on_device(mlp(true));
  module->named_parameters()["second.weight"].set_requires_grad(false);
  const auto plain = copy_of(module);
  auto options = with_cap(0.0001);
  options.find_unused_parameters = true;
  DistributedDataParallel model(module, group(), options);
  {
    const auto guard = model.no_sync();
    model.forward(batch_of(rank(), 0, 4)).toTensor().sum().backward();
  }
  model.forward(batch_of(rank(), 1, 4)).toTensor().sum().backward();
  for (int64_t step = 0; step < 2; ++step) {
    (plain->forward(concatenated(step, 4)).toTensor().sum() / world()).backward();
  }
  check_equal(grads_of(*module), grads_of(*plain));
  CHECK_FALSE(module->named_parameters()["second.weight"].grad().defined());
}

TEST_CASE("ZeRO-1 and EMA of an exported module") {
  auto module = on_device(mlp(false));
  const auto plain = copy_of(module);
  DistributedDataParallel model(module, group());
  auto optimizer = make_optimizer(model, {.momentum = 0.5, .zero1 = true});
  Ema ema(model, {.decay = 0.5});
  torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5));
  for (int64_t step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    reference.zero_grad();
    model.forward(batch_of(rank(), step, 4)).toTensor().sum().backward();
    (plain->forward(concatenated(step, 4)).toTensor().sum() / world()).backward();
    optimizer->step(0.125);
    reference.step();
    ema.update();
  }
  const auto parameters = module->parameters(), expected = plain->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(torch::allclose(parameters[i], expected[i], 1e-5, 1e-5));  // sums in another order
  }
  CHECK(ema.averages().at(0).name == "first.weight");
}

TEST_CASE("batch norms of an exported module take the statistics of all ranks") {
  auto module = on_device(batch_norm());
  const auto plain = copy_of(module);
  convert_sync_batchnorm(*module, group());
  DistributedDataParallel model(module, group());
  const auto x = batch_of(rank(), 0, 4), all = concatenated(0, 4);
  const auto y = model.forward(x).toTensor();
  const auto expected = plain->forward(all).toTensor();
  CHECK(torch::allclose(y, expected.narrow(0, rank() * 3, 3), 1e-5, 1e-6));
  // A loss that does not vanish through the normalization.
  (y * y * x).sum().backward();
  ((expected * expected * all).sum() / world()).backward();
  for (size_t i = 0; i < 2; ++i) {
    CHECK(
        torch::allclose(module->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-4, 1e-5));
  }
  for (const auto& buffer : plain->named_buffers()) {
    CAPTURE(buffer.key());
    CHECK(torch::allclose(module->named_buffers()[buffer.key()], buffer.value(), 1e-5, 1e-6));
  }
  model.eval();
  plain->eval();
  CHECK(torch::allclose(model.forward(x).toTensor(), plain->forward(x).toTensor(), 1e-5, 1e-6));
}

// Without running estimates the operator normalizes by the batch in evaluation too.
TEST_CASE("an evaluation of a norm without running estimates is of one rank alone") {
  ArchiveBuilder archive;
  archive.parameter("norm.weight", at::full({4}, 2.0F)).parameter("norm.bias", at::ones({4}));
  archive.input("x", {symbol("s0"), integer(4)});
  auto arguments = norm_arguments();
  arguments[3].second = arguments[4].second = {{"as_none", true}};
  arguments.emplace_back("cudnn_enabled", truth(false));
  archive.node("torch.ops.aten.batch_norm.default", arguments, {tensor("y")});
  archive.output(tensor("y"));
  auto module = on_device(archive);
  const auto plain = copy_of(module);
  convert_sync_batchnorm(*module, group());
  const auto x = batch_of(rank(), 0, 4), all = concatenated(0, 4);
  CHECK(torch::allclose(module->forward(x).toTensor(),
                        plain->forward(all).toTensor().narrow(0, rank() * 3, 3), 1e-5, 1e-6));
  module->eval();
  CHECK(torch::allclose(module->forward(x).toTensor(), plain->forward(x).toTensor(), 1e-5, 1e-6));
}

// A block of x -> x w, and w v, which the loss does not use.
TEST_CASE("a checkpointed block may have parameters that the loss does not use") {
  ArchiveBuilder archive;
  archive.parameter("w", torch::full({4}, 2.0)).parameter("v", torch::ones({4}));
  archive.input("x", {symbol("s0"), integer(4)});
  archive.node("torch.ops.aten.mul.Tensor", Parts{{"self", tensor("x")}, {"other", tensor("p_w")}},
               {tensor("y")});
  archive.node("torch.ops.aten.mul.Tensor",
               Parts{{"self", tensor("p_w")}, {"other", tensor("p_v")}}, {tensor("product")});
  archive.module("block").output(tensor("y")).output(tensor("product"));
  const testing::TemporaryFolder folder;
  archive.write(folder.file("net.pt2"));
  ExportedModule module(folder.file("net.pt2"),
                        ExportedModuleOptions{.checkpoint_blocks = {"block"}});
  module->to(context().device());
  auto options = with_cap(0.0001);
  options.find_unused_parameters = true;
  DistributedDataParallel model(module, group(), options);
  for (int64_t step = 0; step < 2; ++step) {
    module->zero_grad();
    const auto outputs = model.forward(batch_of(rank(), step, 4)).toTuple();
    outputs->elements()[0].toTensor().sum().backward();
    CHECK(torch::allclose(module->parameters()[0].grad(), concatenated(step, 4).sum(0) / world()));
    CHECK((!module->parameters()[1].grad().defined() ||
           module->parameters()[1].grad().eq(0).all().item<bool>()));
  }
}

TEST_CASE("norms whose statistics cannot be shared are refused") {
  auto decomposed = batch_norm();
  decomposed.node("torch.ops.aten._native_batch_norm_legit_functional.default", norm_arguments(),
                  {tensor("z"), tensor("a"), tensor("b"), tensor("c"), tensor("d")});
  auto module = on_device(decomposed);
  CHECK_THAT(message_of<SettingsError>([&] { convert_sync_batchnorm(*module, group()); }),
             Catch::Contains("_native_batch_norm_legit_functional"));
  CHECK_FALSE(module->overrides("aten::batch_norm"));
}

TEST_CASE("a norm of an exported module refuses another number of features") {
  auto archive = batch_norm();
  archive.values["x"] = {{"sizes", {symbol("s0"), symbol("s1")}}};
  auto module = on_device(archive);
  convert_sync_batchnorm(*module, group());
  CHECK_THAT(message_of<SettingsError>([&] {
               module->forward(torch::ones({4, 3}, context().device()));
             }),
             Catch::Contains("SyncBatchNorm of 4 features"));
}

// Keyword arguments, random numbers, a counter, a tied weight and a frozen layer
// (tests/export/models.py).
TEST_CASE("captured steps of an exported module have the bits of eager ones") {
  struct Run {
    explicit Run(CudaGraph mode)
        : module(std::string(DDP_SOURCE_DIR) + "/tests/golden/exported/two_inputs/model.pt2") {
      module->to(context().device());
      model.emplace(module, group());
      optimizer = make_optimizer(*model, {.type = OptimizerType::AdamW});
      torch::manual_seed(3 + rank());
      step.emplace(
          context(), GraphedParts{.models = {&*model}, .optimizers = {optimizer.get()}},
          [this](const std::vector<torch::Tensor>& batch, const StepScalars& scalars) {
            model->zero_grad();
            const auto output = model->forward(batch[0], batch[1]).toGenericDict();
            auto loss = output.at("joined").toTensor().square().mean() +
                        output.at("parts").toListRef()[1].toTensor();
            loss.backward();
            optimizer->step(scalars);
            return std::vector{loss};
          },
          GraphedStepOptions{.mode = mode});
    }
    void train(int64_t i) {
      const int64_t size = i % 3 == 0 ? 4 : 3;
      (*step)({batch_of(rank(), i, 6, size), batch_of(rank(), i + 50, 6, size)},
              {.lr = 0.01, .step = i});
    }
    ExportedModule module;
    std::optional<DistributedDataParallel<ExportedModule>> model;
    std::unique_ptr<Optimizer> optimizer;
    std::optional<GraphedStep<std::vector<torch::Tensor>, std::vector<torch::Tensor>>> step;
  };
  constexpr int64_t kSteps = 12;
  const bool is_cuda = context().device().is_cuda();
  std::vector<torch::Tensor> eager;
  {
    Run run(CudaGraph::Off);
    for (int64_t i = 0; i < kSteps; ++i) {
      run.train(i);
    }
    for (const auto& [name, value] : run.module->state_dict()) {
      eager.push_back(value.clone());
    }
    CHECK(run.module->named_buffers()["count"].item<int64_t>() == kSteps);
  }
  Run run(is_cuda ? CudaGraph::On : CudaGraph::Auto);
  for (int64_t i = 0; i < kSteps; ++i) {
    run.train(i);
  }
  std::vector<torch::Tensor> captured;
  for (const auto& [name, value] : run.module->state_dict()) {
    captured.push_back(value);
  }
  check_equal(captured, eager);
  CHECK((run.step->counts().replayed > 0) == is_cuda);
}
