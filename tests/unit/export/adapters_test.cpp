// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters on the linear layers of exported programs, and PEFT's files of them.
#include <torch/torch.h>

#include <ATen/autocast_mode.h>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ddp/export/exported_module.hpp"
#include "ddp/train/weights.hpp"
#include "models/lora.hpp"
#include "models/pretrained/peft_adapter.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/same_bits.hpp"
#include "unit/export/adapted_modules.hpp"
#include "unit/export/archive_builder.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;
using testing::same_bits;
using testing::TemporaryFolder;

namespace {

const models::LoraOptions kBoth{
    .rank = 2, .alpha = 6, .dropout = 0, .target_modules = {"up", "net.down"}};

/// x [batch, 4] -> up [5, 4] with bias -> relu -> down [3, 5]
ArchiveBuilder perceptron() {
  ArchiveBuilder archive;
  archive.parameter("net.up.weight", values({5, 4}, 0.7)).parameter("net.up.bias", values({5}, 1));
  archive.parameter("net.down.weight", values({3, 5}, 1.3));
  archive.input("x", {symbol("s0"), integer(4)});
  archive.linear("x", "p_net_up_weight", "h", "p_net_up_bias").relu("h", "r");
  archive.linear("r", "p_net_down_weight", "y");
  archive.output(tensor("y"));
  return archive;
}

/// A layer without bias and its adapter by hand.
at::Tensor layer(const torch::nn::Module& module, const std::string& name, const at::Tensor& x,
                 double scale = 2) {
  return at::linear(x, parameter(module, name + ".weight")) + scale * low_rank(module, name, x);
}

/// The perceptron by hand, with the parameters of `module`.
at::Tensor by_hand(const torch::nn::Module& module, const at::Tensor& x, double scale) {
  const auto h = layer(module, "net.up", x, scale) + parameter(module, "net.up.bias");
  return layer(module, "net.down", at::relu(h), scale);
}

}  // namespace

TEST_CASE("Adapters of a program compute what Python's do, and only they are trained", "[export]") {
  auto module = load(perceptron());
  const auto before = run(*module);
  torch::manual_seed(3);
  const auto summary = models::add_lora(*module, kBoth);
  CHECK(summary.layers == std::vector<std::string>{"net.up", "net.down"});
  CHECK(summary.num_trainable == 2 * (5 + 4) + 2 * (3 + 5));
  CHECK(summary.num_frozen == 20 + 5 + 15);
  CHECK(module->named_parameters().keys() ==
        std::vector<std::string>{"net.up.weight", "net.up.bias", "net.up.lora_A.weight",
                                 "net.up.lora_B.weight", "net.down.weight",
                                 "net.down.lora_A.weight", "net.down.lora_B.weight"});
  CHECK(same_bits(run(*module), before));  // B is 0
  // The same numbers as for the library's own layers.
  torch::manual_seed(3);
  auto expected_a = torch::empty({2, 4});
  torch::nn::init::kaiming_uniform_(expected_a, std::sqrt(5.0));
  CHECK(same_bits(parameter(*module, "net.up.lora_A.weight"), expected_a));

  randomize(*module);
  const auto output = run(*module);
  CHECK_FALSE(at::allclose(output, before));
  const auto expected = by_hand(*module, input_rows(), 3);
  CHECK(at::allclose(output, expected, 1e-5, 1e-6));
  std::vector<at::Tensor> adapters;
  for (const auto& item : module->named_parameters()) {
    const bool is_adapter = item.key().find(".lora_") != std::string::npos;
    CHECK(item.value().requires_grad() == is_adapter);
    if (is_adapter) {
      adapters.push_back(item.value());
    }
  }
  const auto gradients = torch::autograd::grad({expected.square().sum()}, adapters);
  output.square().sum().backward();
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    CHECK(at::allclose(adapters[i].grad(), gradients[i], 1e-4, 1e-5));
  }
  CHECK_FALSE(parameter(*module, "net.up.weight").grad().defined());
}

TEST_CASE("An adapter of a program equals that of the library's own layer", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("fc.weight", values({5, 4}, 0.7)).parameter("fc.bias", values({5}, 1));
  archive.input("x", {symbol("s0"), integer(4)});
  archive.linear("x", "p_fc_weight", "y", "p_fc_bias");
  auto module = load(archive.output(tensor("y")));
  models::Linear own(4, 5, true);
  const models::LoraOptions options{.rank = 3, .alpha = 4, .dropout = 0, .target_modules = {"fc"}};
  models::add_lora(*module, options);
  own->add_lora(options);
  randomize(*module);
  torch::NoGradGuard no_grad;
  own->weight.copy_(parameter(*module, "fc.weight"));
  own->bias.copy_(parameter(*module, "fc.bias"));
  own->lora_a.copy_(parameter(*module, "fc.lora_A.weight"));
  own->lora_b.copy_(parameter(*module, "fc.lora_B.weight"));
  CHECK(at::allclose(run(*module), own->forward(input_rows()), 1e-5, 1e-6));
  models::merge_lora(*module);
  own->merge_lora();
  CHECK(same_bits(parameter(*module, "fc.weight"), own->weight));
}

TEST_CASE("Copies, moves and checkpoints of a program have its adapters", "[export]") {
  auto module = load(perceptron());
  models::add_lora(*module, kBoth);
  randomize(*module);
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  REQUIRE(copy != nullptr);
  CHECK(copy->named_parameters().keys() == module->named_parameters().keys());
  CHECK(same_bits(run(*copy), run(*module)));
  CHECK_FALSE(parameter(*copy, "net.up.weight").requires_grad());
  CHECK(parameter(*copy, "net.up.lora_A.weight").requires_grad());
  const auto expected = run(*module).to(at::kDouble);
  module->to(at::kDouble);
  CHECK(parameter(*module, "net.up.lora_A.weight").scalar_type() == at::kDouble);
  CHECK(at::allclose(run(*module, input_rows().to(at::kDouble)), expected, 1e-5, 1e-6));

  // The copy has its own memory, and its own adapters.
  const auto weights = ddp::named_weights(*copy);
  CHECK(weights.count("net.down.lora_B.weight") == 1);
  CHECK(weights.size() == 7);
  models::merge_lora(*module);
  CHECK(copy->named_parameters().size() == 7);
  torch::NoGradGuard no_grad;
  parameter(*copy, "net.up.lora_B.weight").zero_();
  CHECK_FALSE(at::allclose(run(*copy), expected.to(at::kFloat)));
}

TEST_CASE("The dropout of adapters follows the mode", "[export]") {
  const TemporaryFolder folder;
  auto archive = perceptron();
  SECTION("one program") {}
  SECTION("two programs") {
    archive.evaluation(archive);
  }
  archive.write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"));
  models::add_lora(*module, {.rank = 2, .alpha = 4, .dropout = 0.5, .target_modules = {"down"}});
  randomize(*module);
  const auto h = at::relu(at::linear(input_rows(), parameter(*module, "net.up.weight"),
                                     parameter(*module, "net.up.bias")));
  const auto expected = [&](bool training) {
    torch::manual_seed(5);
    const auto dropped = at::dropout(h, 0.5, training);
    return at::linear(h, parameter(*module, "net.down.weight")) +
           2 * low_rank(*module, "net.down", dropped);
  };
  for (const bool training : {true, false, true}) {
    module->train(training);
    const auto result = expected(training);
    torch::manual_seed(5);
    CHECK(at::allclose(run(*module), result, 1e-5, 1e-6));
  }
  CHECK_FALSE(at::allclose(expected(true), expected(false)));
}

TEST_CASE("Adapters give an archive no mode that it lacks", "[export]") {
  auto archive = perceptron();
  archive.others["extra/libddp_mode"] = "eval";
  auto module = load(archive);
  models::add_lora(*module, {.rank = 2, .dropout = 0.5, .target_modules = {"down"}});
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->train(); }),
             Contains("has only the evaluation"));
  CHECK_FALSE(module->is_training());
}

TEST_CASE("A layer that only the evaluation decomposes has no adapter", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("up.weight", at::eye(3)).input("x", {symbol("s0"), integer(3)});
  auto evaluation = archive;
  archive.linear("x", "p_up_weight", "y").output(tensor("y"));
  evaluation.node("torch.ops.aten.mm.default",
                  {{"self", tensor("x")}, {"mat2", tensor("p_up_weight")}}, {tensor("y")});
  auto module = load(archive.evaluation(evaluation.output(tensor("y"))));
  CHECK_THAT(message_of<ddp::SettingsError>(
                 [&] { models::add_lora(*module, {.rank = 1, .target_modules = {"up"}}); }),
             Contains("up is no aten.linear in the program of evaluation"));
  CHECK(module->named_parameters().size() == 1);
}

TEST_CASE("A merged adapter is in the weights, and the program is as before", "[export]") {
  const TemporaryFolder folder;
  perceptron().write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"));
  const auto names = module->named_parameters().keys();
  models::add_lora(*module, kBoth);
  randomize(*module);
  CHECK_THAT(
      message_of<ddp::SettingsError>([&] { module->save_archive(folder.file("trained.pt2")); }),
      Contains("adapter at net.down") && Contains("merge_lora()") && Contains("save_adapter()"));
  const auto adapted = run(*module);
  models::merge_lora(*module);
  CHECK(module->named_parameters().keys() == names);
  CHECK(at::allclose(run(*module), adapted, 1e-5, 1e-5));
  module->save_archive(folder.file("trained.pt2"));
  CHECK(same_bits(run(*ddp::ExportedModule(folder.file("trained.pt2"))), run(*module)));

  const auto merged = parameter(*module, "net.up.weight").clone();
  models::merge_lora(*module);  // nothing is left
  CHECK(same_bits(parameter(*module, "net.up.weight"), merged));
  models::add_lora(*module, kBoth);  // again
  CHECK(module->named_parameters().size() == 7);
}

TEST_CASE("Adapters take part in graphs inside the graph", "[export]") {
  // The weight of a region is its last operand, and that of a choice is in its last list.
  ArchiveBuilder region;
  region.input("a", {}).input("w", {});
  region.linear("a", "w", "b");
  region.output(tensor("b"));
  ArchiveBuilder twice;
  twice.input("a", {}).input("w", {});
  twice.linear("a", "w", "b");
  twice.linear("b", "w", "c");
  twice.output(tensor("c"));
  ArchiveBuilder archive;
  archive.parameter("first.weight", values({4, 4}, 0.7));
  archive.parameter("second.weight", values({4, 4}, 1.1));
  archive.input("x", {symbol("s0"), integer(4)}).input("p", {});
  archive.node("torch.ops.higher_order.wrap_with_set_grad_enabled",
               {{"", truth(true)},
                {"", graph_argument(region)},
                {"", tensor("x")},
                {"", tensor("p_first_weight")}},
               {tensor("h")});
  archive.node("torch.ops.higher_order.cond",
               {{"", tensor("p")},
                {"", graph_argument(region)},
                {"", graph_argument(twice)},
                {"", {{"as_tensors", {{{"name", "h"}}, {{"name", "p_second_weight"}}}}}}},
               {tensor("y")});
  auto module = load(archive.output(tensor("y")));
  const auto call = [&](bool predicate) {
    return module->forward(input_rows(), at::scalar_tensor(predicate, at::kBool)).toTensor();
  };
  models::add_lora(*module, {.rank = 2, .alpha = 4, .dropout = 0, .target_modules = {"*"}});
  randomize(*module);
  const auto once = layer(*module, "second", layer(*module, "first", input_rows()));
  CHECK(at::allclose(call(true), once, 1e-4, 1e-4));
  CHECK(at::allclose(call(false), layer(*module, "second", once), 1e-4, 1e-4));
  call(true).sum().backward();
  CHECK(parameter(*module, "first.lora_A.weight").grad().abs().sum().item<float>() > 0);
  const auto merged = call(false);
  models::merge_lora(*module);
  CHECK(at::allclose(call(false), merged, 1e-4, 1e-4));
}

TEST_CASE("Adapters take part in loops", "[export]") {
  // The weights are operands that every turn uses, in the last list.
  ArchiveBuilder condition, turn, row;
  condition.input("n", {}).input("a", {}).input("w", {});
  condition.node("torch.ops.aten.lt.Scalar", {{"self", tensor("n")}, {"other", integer(2)}},
                 {tensor("goes_on")});
  condition.output(tensor("goes_on"));
  turn.input("n", {}).input("a", {}).input("w", {});
  turn.node("torch.ops.aten.add.Tensor", {{"self", tensor("n")}, {"other", integer(1)}},
            {tensor("next")});
  turn.linear("a", "w", "b");
  turn.output(tensor("next")).output(tensor("b"));
  row.input("r", {}).input("w", {});
  row.linear("r", "w", "s");
  row.output(tensor("s"));
  ArchiveBuilder sum;
  sum.input("carried", {}).input("r", {}).input("w", {});
  sum.linear("r", "w", "s");
  sum.node("torch.ops.aten.add.Tensor", {{"self", tensor("carried")}, {"other", tensor("s")}},
           {tensor("t")});
  sum.node("torch.ops.aten.clone.default", {{"self", tensor("t")}}, {tensor("copy")});
  sum.output(tensor("t")).output(tensor("copy"));

  ArchiveBuilder archive;
  for (const char* name : {"while.weight", "map.weight", "scan.weight"}) {
    archive.parameter(name, values({4, 4}, name[0]));
  }
  archive.input("x", {symbol("s0"), integer(4)}).input("n", {}).input("start", {integer(4)});
  archive.node("torch.ops.higher_order.while_loop",
               {{"", graph_argument(condition)},
                {"", graph_argument(turn)},
                {"", list_of({"n", "x"})},
                {"", list_of({"p_while_weight"})}},
               {tensor("last"), tensor("h")});
  archive.node("torch.ops.higher_order.map_impl",
               {{"", graph_argument(row)}, {"", list_of({"h"})}, {"", list_of({"p_map_weight"})}},
               {tensor("g")});
  archive.node("torch.ops.higher_order.scan",
               {{"", graph_argument(sum)},
                {"", list_of({"start"})},
                {"", list_of({"g"})},
                {"", list_of({"p_scan_weight"})}},
               {tensor("end"), tensor("sums")});
  auto module = load(archive.output(tensor("sums")));
  const auto call = [&] {
    return module->forward(input_rows(), at::zeros({}, at::kLong), at::zeros({4})).toTensor();
  };
  models::add_lora(*module, {.rank = 2, .alpha = 4, .dropout = 0, .target_modules = {"*"}});
  randomize(*module);
  const auto looped = layer(*module, "while", layer(*module, "while", input_rows()));
  const auto expected = layer(*module, "scan", layer(*module, "map", looped)).cumsum(0);
  const auto result = call();
  CHECK(at::allclose(result, expected, 1e-4, 1e-4));
  result.square().sum().backward();
  for (const char* name : {"while", "map", "scan"}) {
    const auto& adapter = parameter(*module, std::string(name) + ".lora_A.weight");
    const auto by_formula = torch::autograd::grad({expected.square().sum()}, {adapter}, {},
                                                  /*retain_graph=*/true);
    CHECK(at::allclose(adapter.grad(), by_formula[0], 1e-3, 1e-3));
  }
  models::merge_lora(*module);
  CHECK(at::allclose(call(), expected, 1e-4, 1e-4));
}

TEST_CASE("The branch computes in the dtype of the layer's input", "[export]") {
  auto module = load(perceptron());
  module->to(at::kBFloat16);
  models::add_lora(*module, kBoth);
  randomize(*module);
  CHECK(parameter(*module, "net.up.lora_A.weight").scalar_type() == at::kFloat);
  const auto output = run(*module, input_rows().to(at::kBFloat16));
  CHECK(output.scalar_type() == at::kBFloat16);
  output.sum().backward();
  CHECK(parameter(*module, "net.up.lora_A.weight").grad().scalar_type() == at::kFloat);
  models::merge_lora(*module);
  CHECK(parameter(*module, "net.up.weight").scalar_type() == at::kBFloat16);

  module = load(perceptron());
  models::add_lora(*module, kBoth);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto cast = run(*module);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  CHECK(cast.scalar_type() == at::kBFloat16);
}

TEST_CASE("Adapters that a program cannot have are refused, and it stays as it is", "[export]") {
  auto module = load(perceptron());
  CHECK_THAT(add_lora_error(*module, {.rank = 0}), Contains("rank = 0"));
  CHECK_THAT(add_lora_error(*module, {.target_modules = {"up", "c_attn"}}),
             Contains("\"c_attn\" matches no linear layer of this model"));
  auto options = kBoth;
  options.fp8_base = true;
  CHECK_THAT(add_lora_error(*module, options),
             Contains("fp8_base") && Contains("net.up") && Contains("fp8_base = false"));
  CHECK(module->named_parameters().size() == 3);
  CHECK(parameter(*module, "net.up.weight").requires_grad());

  models::add_lora(*module, {.rank = 2, .alpha = 6, .dropout = 0, .target_modules = {"up"}});
  CHECK_THAT(add_lora_error(*module, kBoth), Contains("net.up already has an adapter"));
  CHECK(parameter(*module, "net.up.lora_A.weight").requires_grad());
  models::add_lora(*module, {.rank = 1, .alpha = 1, .dropout = 0, .target_modules = {"down"}});
  CHECK(module->named_parameters().size() == 7);

  const auto refused = [&](const std::string& name, const at::Tensor& a, const at::Tensor& b) {
    return message_of<ddp::SettingsError>(
        [&] { module->add_adapters({{.name = name, .weight = {}, .lora_a = a, .lora_b = b}}); });
  };
  CHECK_THAT(refused("up", at::ones({1, 4}), at::ones({5, 1})),
             Contains("up is no linear layer of the program"));
  CHECK_THAT(refused("net.up", at::ones({1, 4}), at::ones({5, 1})), Contains("already has"));
  models::merge_lora(*module);
  CHECK_THAT(refused("net.up", at::ones({1, 4}), at::ones({4, 1})),
             Contains("[1, 4] and [4, 1]") && Contains("net.up of [5, 4]"));
}

TEST_CASE("PEFT's files hold the adapters of a program", "[export]") {
  const TemporaryFolder folder;
  const auto path = folder.file("adapter");
  auto module = load(perceptron());
  models::add_lora(*module, {.rank = 2, .alpha = 6, .dropout = 0.1, .target_modules = {"*"}});
  randomize(*module);
  module->eval();
  const auto identity = models::base_identity(*module);
  models::save_adapter(*module, path, "net", identity);
  const auto adapter = models::read_adapter(path);
  CHECK(adapter.lora.rank == 2);
  CHECK(adapter.lora.alpha == 6);
  CHECK(adapter.lora.target_modules == std::vector<std::string>{"net.down", "net.up"});
  std::ifstream config(path + "/adapter_config.json");
  CHECK(Json::parse(config)["task_type"].is_null());  // of any model
  const auto tensors = ddp::load_safetensors(path + "/adapter_model.safetensors").tensors;
  CHECK(tensors.size() == 4);
  CHECK(same_bits(tensors.at("base_model.model.net.up.lora_A.weight"),
                  parameter(*module, "net.up.lora_A.weight").detach()));

  auto bare = load(perceptron());
  bare->eval();
  CHECK(models::base_identity(*bare) == identity);
  CHECK(models::add_adapter(*bare, path).layers.size() == 2);
  CHECK(same_bits(run(*bare), run(*module)));
  models::add_lora(*(bare = load(perceptron())),
                   {.rank = 2, .alpha = 6, .dropout = 0, .target_modules = {"*"}});
  models::load_adapter(*bare, path);
  CHECK(same_bits(run(*bare), run(*module)));
  auto small = load(perceptron());
  models::add_lora(*small, {.rank = 2, .alpha = 6, .target_modules = {"up"}});
  CHECK_THAT(message_of<ddp::MismatchError>([&] { models::load_adapter(*small, path); }),
             Contains("net.down"));
}

TEST_CASE("A short name in PEFT's config never means another module", "[export]") {
  // PEFT would adapt the convolution "stem.proj" too.
  ArchiveBuilder archive;
  archive.parameter("stem.proj.weight", at::ones({1, 1, 1})).parameter("a.proj.weight", at::eye(2));
  archive.parameter("a.fc.weight", at::eye(2));
  archive.input("x", {symbol("s0"), integer(2)});
  archive.linear("x", "p_a_proj_weight", "h");
  archive.linear("h", "p_a_fc_weight", "y");
  auto module = load(archive.output(tensor("y")));
  models::add_lora(*module, {.rank = 1, .alpha = 1, .dropout = 0, .target_modules = {"*"}});
  const TemporaryFolder folder;
  models::save_adapter(*module, folder.file("adapter"));
  std::ifstream file(folder.file("adapter/adapter_config.json"));
  CHECK(Json::parse(file)["target_modules"] == std::vector<std::string>{"a.proj", "fc"});
}

TEST_CASE("A program inside another module has adapters under its place", "[export]") {
  torch::nn::Sequential outer;
  outer->push_back("exported", torch::nn::Linear(1, 1));
  outer->register_module("net", load(perceptron()).ptr());
  const auto summary = models::add_lora(*outer, {.rank = 1, .target_modules = {"net.net.up"}});
  CHECK(summary.layers == std::vector<std::string>{"net.net.up"});
  CHECK(parameter(*outer, "net.net.up.lora_A.weight").requires_grad());
  CHECK_FALSE(parameter(*outer, "exported.weight").requires_grad());
  models::merge_lora(*outer);
  CHECK(outer->named_parameters().size() == 5);
}
