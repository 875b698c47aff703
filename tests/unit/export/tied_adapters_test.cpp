// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters on linear layers whose weight has other uses.
#include <utility>
#include <vector>

#include "ddp/export/exported_module.hpp"
#include "models/lora.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/adapted_modules.hpp"
#include "unit/export/archive_builder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;

TEST_CASE("A tied weight gets an adapter at its linear layer alone", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("tokens.weight", values({6, 4}, 0.7)).parameter("head.weight", at::eye(2));
  archive.weights["head.weight"] = archive.weights["tokens.weight"];
  archive.records.erase("weight_1");
  archive.input("ids", {symbol("s0")});
  archive.node("torch.ops.aten.embedding.default",
               {{"weight", tensor("p_tokens_weight")}, {"indices", tensor("ids")}}, {tensor("h")});
  archive.linear("h", "p_tokens_weight", "y");
  archive.nodes.back()["metadata"]["nn_module_stack"] = "net,,net.Net;head,head,torch.nn.Linear";
  auto module = load(archive.output(tensor("y")));
  CHECK_THAT(add_lora_error(*module, {.target_modules = {"tokens"}}),
             Contains("\"tokens\" matches no linear layer") &&
                 Contains("tokens has a weight, but is not a linear layer"));
  models::add_lora(*module, {.rank = 2, .alpha = 2, .dropout = 0, .target_modules = {"head"}});
  CHECK(module->named_parameters().keys() ==
        std::vector<std::string>{"tokens.weight", "head.lora_A.weight", "head.lora_B.weight"});
  const auto copy = module->clone();
  CHECK(copy->named_parameters().keys() == module->named_parameters().keys());
  randomize(*module);
  const auto ids = at::arange(3);
  const auto h = at::embedding(parameter(*module, "tokens.weight"), ids);
  const auto expected =
      at::linear(h, parameter(*module, "tokens.weight")) + low_rank(*module, "head", h);
  CHECK(at::allclose(run(*module, ids), expected, 1e-5, 1e-6));
  CHECK_THAT(message_of<std::invalid_argument>([&] { models::merge_lora(*module); }),
             Contains("adapter of head cannot be merged") && Contains("save the adapter"));
}

// y = second(first(x)) of two modules, whose weights are one.
TEST_CASE("An adapter on one of two linear layers with one weight is in its calls alone",
          "[export]") {
  ArchiveBuilder archive;
  archive.parameter("first.weight", values({4, 4}, 0.7)).parameter("first.bias", at::ones({4}));
  archive.parameter("second.weight", at::eye(4)).parameter("second.bias", at::zeros({4}));
  archive.weights["second.weight"] = archive.weights["first.weight"];
  archive.records.erase("weight_2");
  archive.input("x", {symbol("s0"), integer(4)});
  archive.linear("x", "p_first_weight", "h", "p_first_bias").module("first");
  archive.linear("h", "p_first_weight", "y", "p_second_bias").module("second", 1);
  archive.output(tensor("y"));
  SECTION("default") {}
  SECTION("strict export") {  // lists one name of a tensor
    archive.inputs.erase(2);
    archive.input_specs.erase(2);
  }
  const auto x = values({3, 4}, 0.3);
  const auto expected = [&](ddp::ExportedModuleImpl& module, bool first, bool second) {
    const auto& weight = parameter(module, "first.weight");
    auto h = at::linear(x, weight, at::ones({4}));
    h = first ? h + low_rank(module, "first", x) : h;
    const auto y = at::linear(h, weight);
    return second ? y + low_rank(module, "second", h) : y;
  };
  for (const auto& [first, second] : {std::pair(true, false), {false, true}, {true, true}}) {
    auto module = load(archive);
    CHECK(module->linears().size() == 2);
    models::LoraOptions options{.rank = 2, .alpha = 2, .dropout = 0, .target_modules = {}};
    if (first) {
      options.target_modules.push_back("first");
    }
    if (second) {
      options.target_modules.push_back("second");
    }
    models::add_lora(*module, options);
    randomize(*module);
    CHECK(at::allclose(run(*module, x), expected(*module, first, second), 1e-4, 1e-5));
    module->eval();
    CHECK(at::allclose(run(*module, x), expected(*module, first, second), 1e-4, 1e-5));
    CHECK_THAT(message_of<std::invalid_argument>([&] { models::merge_lora(*module); }),
               Contains("cannot be merged"));
  }
  // One module under two names is one layer.
  archive.weights["second.bias"] = archive.weights["first.bias"];
  archive.records.erase("weight_3");
  archive.nodes[1]["inputs"][2]["arg"] = tensor("p_first_bias");
  CHECK(load(archive)->linears().size() == 1);
}
