// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing of an exported module: the numbers of a module without it, and what runs
// twice.
#include <torch/torch.h>

#include "models/lora.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;

namespace {

// x -> two blocks of linear, batch norm with its counter, gelu and dropout -> sum over features.
ArchiveBuilder two_blocks() {
  at::manual_seed(3);
  ArchiveBuilder archive;
  for (const std::string block : {"layers.0.", "layers.1."}) {
    archive.parameter(block + "weight", at::randn({4, 4}))
        .parameter(block + "scale", at::rand({4}));
    archive.buffer(block + "running_mean", at::zeros({4}))
        .buffer(block + "running_var", at::ones({4}));
    archive.buffer(block + "num_batches_tracked", at::zeros({}, at::kLong));
  }
  archive.input("x", {symbol("s0"), integer(4)});
  archive.ranges["s0"] = {{"min_val", 2}, {"max_val", 8}};
  std::string value = "x";
  for (const std::string block : {"layers_0_", "layers_1_"}) {
    const std::string path = block == "layers_0_" ? "layers.0" : "layers.1";
    const auto first = archive.nodes.size();
    archive.linear(value, "p_" + block + "weight", block + "h");
    archive.node("torch.ops.aten.add_.Tensor",
                 {{"self", tensor("b_" + block + "num_batches_tracked")}, {"other", integer(1)}},
                 {tensor(block + "counted")});
    archive.node("torch.ops.aten.batch_norm.default",
                 {{"input", tensor(block + "h")},
                  {"weight", tensor("p_" + block + "scale")},
                  {"bias", tensor("p_" + block + "scale")},
                  {"running_mean", tensor("b_" + block + "running_mean")},
                  {"running_var", tensor("b_" + block + "running_var")},
                  {"training", truth(true)},
                  {"momentum", number(0.1)},
                  {"eps", number(1e-5)},
                  {"cudnn_enabled", truth(true)}},
                 {tensor(block + "n")});
    archive.node("torch.ops.aten.gelu.default", {{"self", tensor(block + "n")}},
                 {tensor(block + "g")});
    archive.node("torch.ops.aten.dropout.default",
                 {{"input", tensor(block + "g")}, {"p", number(0.5)}, {"train", truth(true)}},
                 {tensor(block + "d")});
    for (auto i = first; i < archive.nodes.size(); ++i) {
      archive.module(path + (i % 2 != 0 ? ".inner" : ""), i);
    }
    value = block + "d";
  }
  archive.output(tensor(value));
  return archive;
}

ddp::ExportedModule load_blocks(const ArchiveBuilder& archive,
                                const std::vector<std::string>& patterns) {
  return load(archive, {.checkpoint_blocks = patterns});
}

// Counts the calls of gelu.
std::shared_ptr<int> count_gelu(ddp::ExportedModule& module) {
  auto count = std::make_shared<int>(0);
  REQUIRE(module->override_operator("aten::gelu", [count](std::vector<c10::IValue>& stack, bool) {
    ++*count;
    const auto input = stack[0].toTensor();
    stack = {at::gelu(input)};
  }));
  return count;
}

struct Step {
  at::Tensor output, input_gradient;
  std::vector<at::Tensor> state;
  double next_random;
};

Step step(ddp::ExportedModule& module) {
  at::manual_seed(5);
  auto x = at::arange(24, at::kFloat).view({6, 4}).sin().requires_grad_();
  Step result;
  result.output = module->forward(x).toTensor();
  result.output.sin().sum().backward();
  result.input_gradient = x.grad();
  for (const auto& parameter : module->parameters()) {
    result.state.push_back(parameter.grad());
  }
  for (const auto& buffer : module->buffers()) {
    result.state.push_back(buffer);
  }
  result.next_random = at::rand({}).item<double>();
  return result;
}

void require_equal(const Step& a, const Step& b) {
  CHECK(at::equal(a.output, b.output));
  CHECK(at::equal(a.input_gradient, b.input_gradient));
  REQUIRE(a.state.size() == b.state.size());
  for (std::size_t i = 0; i < a.state.size(); ++i) {
    INFO(i);
    CHECK(at::equal(a.state[i], b.state[i]));
  }
  CHECK(a.next_random == b.next_random);
}

}  // namespace

TEST_CASE("Checkpointed blocks run twice and give the same numbers", "[export]") {
  auto plain = load_blocks(two_blocks(), {});
  for (const auto& [patterns, calls] : std::vector<std::pair<std::vector<std::string>, int>>{
           {{"layers.*"}, 4}, {{"layers.1"}, 3}, {{"layers"}, 4}, {{"*.1", "layers.0"}, 4}}) {
    INFO(patterns[0]);
    auto fresh = load_blocks(two_blocks(), {});
    auto module = load_blocks(two_blocks(), patterns);
    const auto count = count_gelu(module);
    require_equal(step(fresh), step(module));
    CHECK(*count == calls);
    require_equal(step(fresh), step(module));  // gradients add up, statistics go on
  }
  plain->eval();
  auto module = load_blocks(two_blocks(), {"layers.*"});
  const auto count = count_gelu(module);
  module->eval();
  require_equal(step(plain), step(module));
  CHECK(*count == 4);
  const at::NoGradGuard no_grad;
  module->forward(at::ones({2, 4}));
  CHECK(*count == 6);
}

TEST_CASE("A checkpointed backward can be run again, and after its module", "[export]") {
  auto module = load_blocks(two_blocks(), {"layers.*"});
  const auto x = at::ones({3, 4}).requires_grad_();
  auto loss = module->forward(x).toTensor().sin().sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = module->parameters()[0].grad().clone();
  loss.backward({}, /*retain_graph=*/true);
  CHECK(at::equal(module->parameters()[0].grad(), once * 2));
  const auto gradient = x.grad().clone();
  count_gelu(module);
  module = nullptr;
  loss.backward();
  CHECK(at::allclose(x.grad(), gradient * 1.5));
}

TEST_CASE("Frozen parameters and frozen blocks stay without a gradient", "[export]") {
  auto plain = load_blocks(two_blocks(), {}), module = load_blocks(two_blocks(), {"layers.*"});
  for (auto* net : {&*plain, &*module}) {
    for (const auto& parameter : net->named_parameters()) {
      parameter.value().requires_grad_(parameter.key() == "layers.1.weight");
    }
    at::manual_seed(1);
    net->forward(at::ones({3, 4}).cumsum(0)).toTensor().sin().sum().backward();
  }
  const auto expected = plain->named_parameters(), got = module->named_parameters();
  for (const auto& parameter : expected) {
    INFO(parameter.key());
    const auto gradient = got[parameter.key()].grad();
    REQUIRE(gradient.defined() == (parameter.key() == "layers.1.weight"));
    CHECK((!gradient.defined() || at::equal(gradient, parameter.value().grad())));
  }
}

// y = relu_(x * w), with relu_ in the block: it changes a value that needs a gradient.
TEST_CASE("A block that changes a recorded value from outside runs once", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({3}, 2.0)).input("x", {symbol("s0"), integer(3)});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("p_w")}},
               {tensor("scaled")});
  archive.node("torch.ops.aten.view.default",
               {{"self", tensor("scaled")}, {"size", {{"as_ints", {-1}}}}}, {tensor("flat")});
  archive.node("torch.ops.aten.relu_.default", {{"self", tensor("flat")}}, {tensor("positive")});
  archive.node("torch.ops.aten.gelu.default", {{"self", tensor("positive")}}, {tensor("g")});
  archive.module("block", 1);
  archive.output(tensor("g"));
  archive.output(tensor("scaled"));
  auto plain = load_blocks(archive, {}), module = load_blocks(archive, {"block"});
  const auto count = count_gelu(module);
  for (auto* net : {&*plain, &*module}) {
    const auto outputs = net->forward(at::arange(6, at::kFloat).view({2, 3}) - 2).toTuple();
    (outputs->elements()[0].toTensor().sum() + outputs->elements()[1].toTensor().sum()).backward();
  }
  CHECK(at::equal(plain->parameters()[0].grad(), module->parameters()[0].grad()));
  CHECK(*count == 1);
}

// A functional program: y = x * u, and u + 1 is the buffer's new value.
TEST_CASE("A block runs again with the buffer that its first run had", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("u", at::full({1}, 3.0)).input("x", {symbol("s0")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("b_u")}},
               {tensor("y")});
  archive.module("block");
  archive.node("torch.ops.aten.add.Tensor", {{"self", tensor("b_u")}, {"other", integer(1)}},
               {tensor("next")});
  archive.new_value("next", "u").output(tensor("y"));
  const testing::TemporaryFolder folder;
  archive.write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"),
                             ddp::ExportedModuleOptions{.checkpoint_blocks = {"block"}});
  const auto x = at::ones({2}).requires_grad_();
  module->forward(x).toTensor().sum().backward();
  CHECK(at::equal(x.grad(), at::full({2}, 3.0)));
  CHECK(module->buffers()[0].item<double>() == 4);
}

// u += 1, y = x * u: the second run counts in a copy.
TEST_CASE("A block runs again with the buffer as it was before the first run", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("u", at::full({1}, 3.0)).input("x", {symbol("s0")});
  archive.node("torch.ops.aten.add_.Tensor", {{"self", tensor("b_u")}, {"other", integer(1)}},
               {tensor("counted")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("counted")}},
               {tensor("y")});
  archive.module("block");
  archive.output(tensor("y"));
  auto module = load_blocks(archive, {"block"});
  const auto x = at::ones({2}).requires_grad_();
  const auto loss = module->forward(x).toTensor().sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  CHECK(at::equal(x.grad(), at::full({2}, 8.0)));
  CHECK(module->buffers()[0].item<double>() == 4);
}

// h = dropout(x, 0), which is x; h *= 2; y = h * w. The schema of dropout does not say so.
TEST_CASE("A block that changes its input through an alias runs once", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({3}, 2.0)).input("x", {symbol("s0"), integer(3)});
  archive.node("torch.ops.aten.dropout.default",
               {{"input", tensor("x")}, {"p", number(0)}, {"train", truth(true)}}, {tensor("h")});
  archive.node("torch.ops.aten.mul_.Tensor", {{"self", tensor("h")}, {"other", integer(2)}},
               {tensor("twice")});
  archive.node("torch.ops.aten.gelu.default", {{"self", tensor("twice")}}, {tensor("g")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("g")}, {"other", tensor("p_w")}},
               {tensor("y")});
  archive.module("block");
  archive.output(tensor("y"));
  auto plain = load_blocks(archive, {}), module = load_blocks(archive, {"block"});
  const auto count = count_gelu(module);
  for (auto* net : {&*plain, &*module}) {
    net->forward(at::arange(6, at::kFloat).view({2, 3})).toTensor().sum().backward();
  }
  CHECK(at::equal(plain->parameters()[0].grad(), module->parameters()[0].grad()));
  CHECK(*count == 1);
}

// out = zeros; out[0] = x * w in the block; the loss is of out alone.
TEST_CASE("A block that writes a value from outside keeps its gradient", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({3}, 2.0)).input("x", {symbol("s0"), integer(3)});
  archive.node("torch.ops.aten.zeros_like.default", {{"self", tensor("x")}}, {tensor("out")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("p_w")}},
               {tensor("y")});
  archive.node("torch.ops.aten.select.int",
               {{"self", tensor("out")}, {"dim", integer(0)}, {"index", integer(0)}},
               {tensor("row")});
  archive.node("torch.ops.aten.select.int",
               {{"self", tensor("y")}, {"dim", integer(0)}, {"index", integer(1)}},
               {tensor("source")});
  archive.node("torch.ops.aten.copy_.default", {{"self", tensor("row")}, {"src", tensor("source")}},
               {tensor("copied")});
  archive.node("torch.ops.aten.gelu.default", {{"self", tensor("y")}}, {tensor("g")});
  archive.module("block", 1);
  archive.output(tensor("out")).output(tensor("g"));
  auto plain = load_blocks(archive, {}), module = load_blocks(archive, {"block"});
  for (auto* net : {&*plain, &*module}) {
    const auto outputs = net->forward(at::arange(6, at::kFloat).view({2, 3})).toTuple();
    (outputs->elements()[0].toTensor().square().sum() + outputs->elements()[1].toTensor().sum())
        .backward();
  }
  CHECK(at::equal(plain->parameters()[0].grad(), module->parameters()[0].grad()));
}

// The block changes a buffer and one of its own views from outside; y = x * the sum of the buffer.
TEST_CASE("A block whose inputs share memory and change runs once", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("u", at::ones({4})).input("x", {symbol("s0")});
  archive.node(
      "torch.ops.aten.slice.Tensor",
      {{"self", tensor("b_u")}, {"dim", integer(0)}, {"start", integer(0)}, {"end", integer(2)}},
      {tensor("part")});
  archive.node("torch.ops.aten.mul_.Tensor", {{"self", tensor("b_u")}, {"other", integer(3)}},
               {tensor("tripled")});
  archive.node("torch.ops.aten.sum.default", {{"self", tensor("part")}}, {tensor("total")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("total")}},
               {tensor("y")});
  archive.module("block", 1);
  archive.output(tensor("y"));
  auto module = load_blocks(archive, {"block"});
  const auto x = at::ones({2}).requires_grad_();
  module->forward(x).toTensor().sum().backward();
  CHECK(at::equal(x.grad(), at::full({2}, 6.0)));
}

// The block returns y = x w and sqrt(0 w), whose gradient is not finite, and the loss uses y alone.
// Without autocast the cast to float32 would return its input, and the block would have one result
// twice.
TEST_CASE("A block is tried out in the autocast regions of its calls", "[export]") {
  constexpr int kFloat = 7, kBFloat16 = 13;
  ArchiveBuilder region;
  region.input("v", {symbol("s0"), integer(3)}).input("w", {integer(3), integer(3)});
  region.linear("v", "w", "product").output(tensor("product"));
  ArchiveBuilder archive;
  archive.parameter("w", at::eye(3)).input("x", {symbol("s0"), integer(3)});
  archive.values["x"]["device"] = {{"type", "cuda"}};  // of the export
  archive.node("torch.ops.higher_order.wrap_with_autocast",
               {{"", {{"as_string", "cuda"}}},
                {"", {{"as_scalar_type", kBFloat16}}},
                {"", truth(true)},
                {"", {{"as_none", true}}},
                {"", graph_argument(region)},
                {"", tensor("x")},
                {"", tensor("p_w")}},
               {tensor("y")});
  archive.node("torch.ops.aten.to.dtype",
               {{"self", tensor("y")}, {"dtype", {{"as_scalar_type", kFloat}}}}, {tensor("z")});
  archive.module("block").output(tensor("y")).output(tensor("z"));
  auto module = load_blocks(archive, {"block"});
  int num_casts = 0;
  module->override_operator("aten::to.dtype", [&](std::vector<c10::IValue>& stack, bool) {
    ++num_casts;
    stack = {stack.at(0).toTensor().to(at::kFloat)};
  });
  const auto results = module->forward(at::ones({2, 3})).toTuple()->elements().vec();
  CHECK(results[0].toTensor().scalar_type() == at::kBFloat16);
  results[1].toTensor().sum().backward();
  CHECK(num_casts == 2);
}

TEST_CASE("Results of a block that the loss does not use have no gradient", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({3}, 2.0)).parameter("v", at::ones({3}));
  archive.input("x", {symbol("s0"), integer(3)});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("p_w")}},
               {tensor("y")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("p_w")}, {"other", tensor("p_v")}},
               {tensor("product")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("product")}, {"other", integer(0)}},
               {tensor("zero")});
  archive.node("torch.ops.aten.sqrt.default", {{"self", tensor("zero")}}, {tensor("root")});
  archive.module("block");
  archive.output(tensor("y")).output(tensor("root"));
  auto module = load_blocks(archive, {"block"});
  const auto outputs = module->forward(at::ones({2, 3})).toTuple();
  outputs->elements()[0].toTensor().sum().backward();
  CHECK(at::equal(module->parameters()[0].grad(), at::full({3}, 2.0)));
  CHECK_FALSE(module->parameters()[1].grad().defined());
}

// ema *= 0.5 in the block, which also returns it; y = x * ema outside.
TEST_CASE("A block that returns the buffer that it changes runs once", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({1}, 2.0)).buffer("ema", at::full({1}, 8.0));
  archive.input("x", {symbol("s0")});
  archive.node("torch.ops.aten.mul_.Tensor", {{"self", tensor("b_ema")}, {"other", number(0.5)}},
               {tensor("changed")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("p_w")}},
               {tensor("h")});
  archive.module("block");
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("h")}, {"other", tensor("changed")}},
               {tensor("y")});
  archive.output(tensor("y"));
  auto module = load_blocks(archive, {"block"});
  for (const double expected : {4.0, 6.0}) {  // gradients add up
    module->forward(at::ones({1})).toTensor().sum().backward();
    CHECK(module->parameters()[0].grad().item<double>() == expected);
    CHECK_FALSE(module->buffers()[0].requires_grad());
  }
}

TEST_CASE("Adapters leave blocks checkpointed", "[export]") {
  auto module = load_blocks(two_blocks(), {"layers.*"});
  const auto count = count_gelu(module);
  models::add_lora(*module, {.rank = 1, .alpha = 1, .dropout = 0, .target_modules = {"layers.*"}});
  step(module);
  CHECK(*count == 4);
}

// The block's results: a sum with a gradient, integers, and a size.
TEST_CASE("A block returns values without a gradient, and sizes", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({3}, 2.0)).input("x", {symbol("s0"), integer(3)});
  archive.node("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}},
               {size_name("rows")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("p_w")}},
               {tensor("y")});
  archive.node("torch.ops.aten.argmax.default", {{"self", tensor("x")}, {"dim", integer(1)}},
               {tensor("best")});
  archive.node("torch.ops.aten.gelu.default", {{"self", tensor("y")}}, {tensor("unused")});
  archive.module("block");
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("y")}, {"other", size_name("rows")}},
               {tensor("scaled")});
  archive.output(tensor("scaled")).output(tensor("best")).output(tensor("unused"));
  auto plain = load_blocks(archive, {}), module = load_blocks(archive, {"block"});
  const auto count = count_gelu(module);
  for (auto* net : {&*plain, &*module}) {
    const auto outputs = net->forward(at::arange(6, at::kFloat).view({2, 3})).toTuple();
    outputs->elements()[0].toTensor().sum().backward();
    CHECK(at::equal(outputs->elements()[0].toTensor(), at::arange(6, at::kFloat).view({2, 3}) * 4));
    CHECK(at::equal(outputs->elements()[1].toTensor(), at::full({2}, 2, at::kLong)));
  }
  CHECK(at::equal(plain->parameters()[0].grad(), module->parameters()[0].grad()));
  CHECK(*count == 2);
}

TEST_CASE("A pattern without a module is refused", "[export]") {
  const auto message =
      message_of<ddp::SettingsError>([] { load_blocks(two_blocks(), {"layer.*"}); });
  CHECK_THAT(message, Contains("checkpoint_blocks: layer.* matches no module"));
  CHECK_THAT(message, Contains("layers.0, layers.0.inner"));
}
