// SPDX-License-Identifier: Apache-2.0
// ExportedModule as a module: names, ties, dtypes, copies, arguments, weights.
#include "ddp/export/exported_module.hpp"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <filesystem>

#include "ddp/detail/model_weights.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/train/weights.hpp"
#include "export/archive.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;
using testing::TemporaryFolder;

namespace {

/// A program of tests/export/models.py, exported by PyTorch 2.11 (tests/golden/exported/README.md).
std::string golden(const std::string& name) {
  return std::string(DDP_SOURCE_DIR) + "/tests/golden/exported/" + name;
}

std::vector<std::string> keys(const torch::OrderedDict<std::string, torch::Tensor>& tensors) {
  return tensors.keys();
}

// y = x W' W', with W under two names. As in Python's archives, the program uses one of them.
ArchiveBuilder tied() {
  ArchiveBuilder archive;
  archive.parameter("embedding.weight", at::eye(2)).parameter("head.weight", at::eye(2));
  archive.weights["head.weight"]["path_name"] = "weight_0";
  archive.records.erase("weight_1");
  archive.input("x", {symbol("s0"), integer(2)});
  archive.linear("x", "p_embedding_weight", "h").linear("h", "p_embedding_weight", "y");
  archive.output(tensor("y"));
  return archive;
}

}  // namespace

TEST_CASE("Parameters and buffers have Python's names and order", "[export]") {
  ArchiveBuilder archive;
  for (const auto* name :
       {"b.weight", "a.0.weight", "a.0.bias", "a.1.weight", "scale", "c.x.weight"}) {
    archive.parameter(name, at::ones({1}));
  }
  for (const auto* name :
       {"mask", "first.table", "a.0.mean", "a.between.count", "a.1.mean", "c.mean"}) {
    archive.buffer(name, at::ones({1}));
  }
  archive.output(archive.inputs[0]);
  auto module = load(archive);
  // Python lists a module's own tensors before its children's.
  CHECK(keys(module->named_parameters()) == std::vector<std::string>{"scale", "b.weight",
                                                                     "a.0.weight", "a.0.bias",
                                                                     "a.1.weight", "c.x.weight"});
  CHECK(keys(module->named_buffers()) == std::vector<std::string>{"mask", "first.table", "a.0.mean",
                                                                  "a.between.count", "a.1.mean",
                                                                  "c.mean"});
}

TEST_CASE("Tied parameters are one parameter, also after a move and in a copy", "[export]") {
  auto module = load(tied());
  CHECK(keys(module->named_parameters()) == std::vector<std::string>{"embedding.weight"});
  module->to(at::kDouble);
  const auto check = [](ddp::ExportedModuleImpl& tied_module) {
    tied_module.zero_grad();
    tied_module.forward(at::ones({1, 2}, at::kDouble)).toTensor().sum().backward();
    // d/dW sum(x W'W') at W = 1: 1 from each use.
    CHECK(at::equal(tied_module.parameters()[0].grad(), at::full({2, 2}, 2.0, at::kDouble)));
    torch::NoGradGuard no_grad;
    tied_module.parameters()[0].mul_(2);
    CHECK(at::equal(tied_module.forward(at::ones({1, 2}, at::kDouble)).toTensor(),
                    at::full({1, 2}, 4.0, at::kDouble)));
  };
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  REQUIRE(copy != nullptr);
  check(*module);
  check(*copy);
}

TEST_CASE("Tensors over one memory stay so after a move and in a copy", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("a.mean", at::zeros({4}))
      .buffer("b.mean", at::zeros({4}))
      .buffer("part", at::zeros({2}));
  for (const auto* name : {"b.mean", "part"}) {
    archive.weights[name]["path_name"] = "weight_0";
  }
  archive.weights["part"]["tensor_meta"]["storage_offset"] = integer(1);
  archive.buffer("count", at::zeros({}, at::kLong)).input("x", {integer(4)});
  archive.node("torch.ops.aten.add_.Tensor", {{"self", tensor("b_a_mean")}, {"other", tensor("x")}},
               {tensor("y")});
  archive.output(tensor("b_part"));
  auto module = load(archive);
  CHECK(keys(module->named_buffers()) == std::vector<std::string>{"part", "count", "a.mean"});
  module->to(at::kDouble);
  CHECK(module->named_buffers()["count"].scalar_type() == at::kLong);
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  for (auto* each : {module.get(), copy.get()}) {
    const auto part = each->forward(at::arange(4, at::kDouble)).toTensor();
    CHECK(at::equal(part, at::arange(1, 3, at::kDouble)));
    CHECK(at::equal(each->state_dict().at("b.mean"), at::arange(4, at::kDouble)));
  }
}

TEST_CASE("Parameters over one memory that are both used are two", "[export]") {
  auto archive = tied();
  archive.linear("x", "p_head_weight", "z");
  archive.output(tensor("z"));
  CHECK(load(archive)->named_parameters().size() == 2);
}

TEST_CASE("A copy shares no memory and keeps mode, names and frozen parameters", "[export]") {
  auto module = load(linear_relu());
  module->named_parameters()["fc.bias"].set_requires_grad(false);
  module->eval();
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  REQUIRE(copy != nullptr);
  CHECK_FALSE(copy->is_training());
  CHECK(keys(copy->named_parameters()) == keys(module->named_parameters()));
  CHECK_FALSE(copy->named_parameters()["fc.bias"].requires_grad());
  torch::nn::init::constant_(module->named_parameters()["fc.weight"], 0.0);
  copy->to(at::kCPU);
  CHECK(at::equal(copy->forward(at::ones({2, 3})).toTensor(), at::full({2, 2}, 3.0F)));
}

TEST_CASE("A dtype that the program names cannot change", "[export]") {
  auto module = load(linear_relu());
  module->to(at::kDouble);
  CHECK(module->forward(at::ones({2, 3}, at::kDouble)).toTensor().scalar_type() == at::kDouble);

  auto archive = linear_relu();
  archive.node("torch.ops.aten.to.dtype",
               {{"self", tensor("relu")}, {"dtype", {{"as_scalar_type", 7}}}}, {tensor("z")});
  module = load(archive);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->to(at::kBFloat16); }),
             Contains("exported in Float") && Contains("aten.to.dtype") && Contains("--dtype") &&
                 Contains("autocast"));
  CHECK_NOTHROW(module->to(at::kFloat));
  CHECK(module->parameters()[0].scalar_type() == at::kFloat);
}

TEST_CASE("Arguments are checked by name and structure", "[export]") {
  ddp::ExportedModule module(golden("two_inputs/model.pt2"));
  const auto a = at::ones({3, 6}), b = at::zeros({3, 6});
  const auto call = [&](std::vector<c10::IValue> positional,
                        std::map<std::string, c10::IValue> keywords) {
    return message_of<ddp::SettingsError>(
        [&] { module->forward(std::move(positional), keywords); });
  };
  CHECK(call({a}, {{"b", b}}).empty());
  CHECK(call({a, b}, {{"power", int64_t{3}}}).empty());
  CHECK(call({}, {{"a", a}, {"b", b}}).empty());
  CHECK_THAT(call({a}, {}), Contains("lacks the argument b of the exported module; it has: "));
  CHECK_THAT(call({a}, {{"b", b}, {"c", b}}), Contains("no argument c; it has: a, b, power"));
  CHECK_THAT(call({a, b}, {{"b", b}}), Contains("argument b is given by position and by name"));
  CHECK_THAT(call({a, b, int64_t{3}, a}, {}), Contains("takes 3 arguments"));
  CHECK_THAT(call({a}, {{"b", b}, {"power", int64_t{2}}}),
             Contains("power was 3 at the export") && Contains("fix"));
  CHECK_THAT(call({c10::ivalue::Tuple::create({a})}, {{"b", b}}), Contains("input a is a tensor"));

  const auto result = module->forward({a}, {{"b", b}}).toGenericDict();
  CHECK(result.at("joined").toTensor().sizes() == at::IntArrayRef({3, 4}));
  CHECK(result.at("parts").toListRef()[1].toTensor().dim() == 0);
}

TEST_CASE("A call is checked without running it", "[export]") {
  ddp::ExportedModule module(golden("two_inputs/model.pt2"));
  const auto a = at::ones({3, 6}), b = at::zeros({3, 6});
  const auto before = ddp::named_weights(*module).at("count").clone();
  module->check_call({a}, {{"b", b}});
  CHECK(at::equal(ddp::named_weights(*module).at("count"), before));
  CHECK_THAT(message_of<ddp::MissingArgumentError>([&] { module->check_call({a}); }),
             Contains("lacks the argument b of the exported module"));
  CHECK_THAT(message_of<ddp::InputSizeError>([&] {
               module->check_call({at::ones({3, 5})}, {{"b", b}});
             }),
             Contains("the size is 5"));
}

TEST_CASE("Weights go to Python and back under the names of its state_dict()", "[export]") {
  const TemporaryFolder folder;
  ddp::ExportedModule module(golden("two_inputs/model.pt2"));
  const auto weights = ddp::named_weights(*module);
  CHECK(weights.count("left.weight") == 1);
  CHECK(weights.count("right.weight") == 1);  // tied to the left one
  CHECK(weights.count("count") == 1);
  CHECK(weights.count("offset") == 0);  // not persistent
  ddp::save_weights(*module, folder.file("weights.safetensors"));
  const auto before = module->parameters()[0].clone();
  torch::nn::init::constant_(module->parameters()[0], 0.0);
  ddp::load_weights(*module, folder.file("weights.safetensors"));
  CHECK(at::equal(module->parameters()[0], before));

  // As a part of another module.
  torch::nn::Sequential outer;
  outer->push_back("net", torch::nn::Linear(1, 1));
  outer->register_module("exported", module.ptr());
  const auto outer_weights = ddp::named_weights(*outer);
  CHECK(outer_weights.count("exported.right.weight") == 1);
  CHECK(outer_weights.count("exported.offset") == 0);
  CHECK(outer_weights.count("net.weight") == 1);
}

TEST_CASE("Weights of a checkpoint have one name of a tied one, and all buffers", "[export]") {
  ddp::ExportedModule module(golden("two_inputs/model.pt2"));
  ddp::TensorMap saved;
  for (const auto& [name, weight] : ddp::named_weights(*module)) {
    saved[name] = weight.clone();
  }
  saved.erase("right.weight");
  saved["offset"] = module->named_buffers()["offset"].clone() + 1;
  const auto before = module->parameters()[0].clone();
  torch::nn::init::constant_(module->parameters()[0], 0.0);
  CHECK(ddp::load_weights(*module, saved, "file").empty());
  CHECK(at::equal(module->parameters()[0], before));
  CHECK(at::equal(module->named_buffers()["offset"], saved["offset"]));
  saved.erase("left.weight");
  CHECK_THROWS_WITH(ddp::load_weights(*module, saved, "file"),
                    Contains("2 missing: left.weight, right.weight"));
}

TEST_CASE("An archive with trained weights can be loaded", "[export]") {
  const TemporaryFolder folder;
  tied().write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"));
  torch::nn::init::constant_(module->parameters()[0], 3.0);
  module->to(at::kDouble);
  module->save_archive(folder.file("trained.pt2"));
  ddp::ExportedModule trained(folder.file("trained.pt2"));
  CHECK(trained->parameters().size() == 1);
  CHECK(at::equal(trained->parameters()[0], at::full({2, 2}, 3.0F)));
  CHECK(at::equal(trained->forward(at::ones({1, 2})).toTensor(), at::full({1, 2}, 36.0F)));
  module->save_archive(folder.file("trained.pt2"));  // replaces
  CHECK_THAT(message_of<ddp::WriteError>([&] { module->save_archive(folder.file("none/x.pt2")); }),
             Contains("none"));
}

// A strict export in evaluation leaves out num_batches_tracked.
TEST_CASE("Weights that are no inputs of the program are kept", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("count", at::full({}, 3, at::kLong));
  archive.inputs.clear();
  archive.input_specs.clear();
  archive.parameter("w", at::ones({2})).input("x", {integer(2)}).output(tensor("p_w"));
  const TemporaryFolder folder;
  archive.write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"));
  torch::nn::init::constant_(module->parameters()[0], 2.0);
  module->save_archive(folder.file("saved.pt2"));
  const ddp::ExportedModule saved(folder.file("saved.pt2"));
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(saved->clone());
  CHECK(keys(copy->named_buffers()).empty());
  CHECK(copy->state_dict().at("count").item<int64_t>() == 3);
  CHECK(at::equal(copy->state_dict().at("w"), at::full({2}, 2.0F)));
}

TEST_CASE("An archive is found again after a change of the working folder", "[export]") {
  const TemporaryFolder folder;
  tied().write(folder.file("net.pt2"));
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  ddp::ExportedModule module("net.pt2");
  std::filesystem::current_path(before);
  module->save_archive(folder.file("trained.pt2"));
  CHECK(std::filesystem::exists(folder.file("trained.pt2")));
}

TEST_CASE("Integer dtypes in the program do not fix the module's dtype", "[export]") {
  constexpr int kFloat = 7, kLong = 5;
  const auto module_with = [](int dtype) {
    auto archive = linear_relu();
    archive.node("torch.ops.aten.to.dtype",
                 {{"self", tensor("relu")}, {"dtype", {{"as_scalar_type", dtype}}}}, {tensor("y")});
    archive.output(tensor("y"));
    return load(archive);
  };
  auto integers = module_with(kLong);
  integers->to(at::kDouble);
  CHECK(integers->forward(at::ones({2, 3}, at::kDouble))
            .toTuple()
            ->elements()[1]
            .toTensor()
            .dtype() == at::kLong);
  auto floats = module_with(kFloat);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { floats->to(at::kDouble); }),
             Contains("names a dtype"));
}

namespace {

// linear_relu(), and `target`(one, relu) of the constant `one`.
ddp::ExportedModule with_constant(const std::string& target, const at::Tensor& one) {
  auto archive = linear_relu();
  archive.constant("one", one);
  archive.node(target, {{"self", tensor("c_one")}, {"other", tensor("relu")}}, {tensor("y")});
  archive.outputs = {tensor("y")};
  archive.output_specs = {{{"user_output", {{"arg", tensor("y")}}}}};
  return load(archive);
}

}  // namespace

TEST_CASE("A program reads its constants", "[export]") {
  auto module = with_constant("torch.ops.aten.add.Tensor", at::full({2}, 5.0F));
  CHECK(module->forward(at::ones({2, 3})).toTensor()[0][0].item<float>() == 8);
}

TEST_CASE("A copy has its own constants, which a program may write", "[export]") {
  auto module = with_constant("torch.ops.aten.add_.Tensor", at::zeros({2, 2}));
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  const torch::NoGradGuard no_grad;
  module->forward(at::ones({2, 3}));
  CHECK(at::equal(copy->forward(at::ones({2, 3})).toTensor(), at::full({2, 2}, 3.0F)));
  CHECK(at::equal(module->forward(at::ones({2, 3})).toTensor(), at::full({2, 2}, 6.0F)));
}

TEST_CASE("A constant of the export's dtype fixes the module's", "[export]") {
  auto module = with_constant("torch.ops.aten.add.Tensor", at::full({2}, 5.0F));
  CHECK_THAT(
      message_of<ddp::SettingsError>([&] { module->to(at::kHalf); }),
      Contains("exported in Float") && Contains("constant one is Float") && Contains("--dtype"));
  CHECK(module->parameters()[0].scalar_type() == at::kFloat);
  CHECK_NOTHROW(module->to(at::kFloat));
  // A number promotes no tensor.
  module = with_constant("torch.ops.aten.add.Tensor", at::full({}, 5.0F));
  module->to(at::kDouble);
  CHECK(module->forward(at::ones({2, 3}, at::kDouble)).toTensor().scalar_type() == at::kDouble);
}

TEST_CASE("Tensors of two dtypes over one memory cannot move", "[export]") {
  constexpr int kDouble = 8;
  ArchiveBuilder archive;
  archive.buffer("a", at::zeros({4})).buffer("b", at::zeros({2}));
  archive.weights["b"]["path_name"] = "weight_0";
  archive.weights["b"]["tensor_meta"]["dtype"] = kDouble;
  auto module = load(archive.output(archive.inputs[0]));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->to(at::kHalf); }),
             Contains("tensors a and b of the module share memory and differ in dtype"));
}

TEST_CASE("A cast that recorded its input's dtype runs under autocast", "[export]") {
  const auto with_cast = [](const std::string& value) {
    ArchiveBuilder archive;
    archive.input(value, {integer(2), integer(2)});
    archive.node("torch.ops.aten._assert_tensor_metadata.default",
                 {{"a", tensor(value)},
                  {"size", {{"as_none", true}}},
                  {"stride", {{"as_none", true}}},
                  {"dtype", {{"as_scalar_type", 7}}}},
                 {});
    archive.node("torch.ops.aten.to.dtype",
                 {{"self", tensor(value)}, {"dtype", {{"as_scalar_type", 7}}}}, {tensor("wide")});
    return archive.output(tensor("wide"));
  };
  auto archive = linear_relu();
  const auto outer = with_cast("linear");
  for (const auto& node : outer.nodes) {
    archive.nodes.push_back(node);
  }
  archive.node("torch.ops.higher_order.wrap_with_set_grad_enabled",
               {{"", truth(true)}, {"", graph_argument(with_cast("v"))}, {"", tensor("linear")}},
               {tensor("inside")});
  auto module = load(archive.output(tensor("inside")).output(tensor("linear")));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const auto outputs = module->forward(at::ones({2, 3})).toTuple()->elements().vec();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  CHECK(outputs[1].toTensor().scalar_type() == at::kFloat);
  CHECK(outputs[2].toTensor().scalar_type() == at::kBFloat16);
}

TEST_CASE("An autocast region of another device than the export's has no effect", "[export]") {
  const auto dtype_in_region = [](const std::string& device) {
    ArchiveBuilder inner;
    inner.input("v", {integer(2), integer(3)}).input("w", {integer(2), integer(3)});
    inner.linear("v", "w", "product").output(tensor("product"));
    auto archive = linear_relu();
    constexpr int kBFloat16 = 13;
    archive.node("torch.ops.higher_order.wrap_with_autocast",
                 {{"", {{"as_string", device}}},
                  {"", {{"as_scalar_type", kBFloat16}}},
                  {"", truth(true)},
                  {"", {{"as_none", true}}},
                  {"", graph_argument(inner)},
                  {"", tensor("x")},
                  {"", tensor("p_fc_weight")}},
                 {tensor("y")});
    auto module = load(archive.output(tensor("y")));
    return module->forward(at::ones({2, 3})).toTuple()->elements()[1].toTensor().scalar_type();
  };
  CHECK(dtype_in_region("cpu") == at::kBFloat16);
  CHECK(dtype_in_region("cuda") == at::kFloat);
}

TEST_CASE("Trained weights are in all programs of an archive", "[export]") {
  // As PyTorch's package_pt2() writes two programs: each has its own weights.
  auto archive = linear_relu();
  archive.evaluation(linear_relu());
  Json table = archive.weights;
  table["fc.weight"]["path_name"] = "weight_8";
  table["fc.bias"]["path_name"] = "weight_9";
  archive.records["weight_8"] = at::ones({2, 3});
  archive.records["weight_9"] = at::zeros({2});
  archive.others["data/weights/eval_weights_config.json"] = Json{{"config", table}}.dump();
  const TemporaryFolder folder;
  archive.write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"));
  torch::nn::init::constant_(module->named_parameters()["fc.weight"], 2.0);
  module->named_parameters()["fc.bias"].set_requires_grad(false);
  module->save_archive(folder.file("trained.pt2"));
  ddp::detail::Pt2Archive trained(folder.file("trained.pt2"));
  for (const char* program : {"model", "eval"}) {
    CAPTURE(program);
    const auto weights = trained.weights(program);
    CHECK(at::equal(weights.at("fc.weight"), at::full({2, 3}, 2.0F)));
    CHECK(weights.at("fc.weight").requires_grad());
    CHECK_FALSE(weights.at("fc.bias").requires_grad());
  }

  // Another file has taken the archive's place.
  archive = linear_relu();
  archive.weights["fc.weight"]["tensor_meta"]["sizes"][0] = integer(1);
  archive.write(folder.file("net.pt2"));
  CHECK_THAT(message_of<ddp::DataError>([&] { module->save_archive(folder.file("trained.pt2")); }),
             Contains("net.pt2 has the tensor fc.weight of [1, 3]") && Contains("[2, 3]"));
  tied().write(folder.file("net.pt2"));
  CHECK_THAT(message_of<ddp::DataError>([&] { module->save_archive(folder.file("trained.pt2")); }),
             Contains("the tensor embedding.weight") && Contains("lacks it"));
}

TEST_CASE("Sizes out of range have their own error", "[export]") {
  auto module = load(linear_relu());
  CHECK_THAT(message_of<ddp::InputSizeError>([&] {
               module->forward(at::ones({9, 3}));
             }),
             Contains("the export allows 2 to 8"));
}

TEST_CASE("A program that returns new buffers writes them", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("total", at::zeros({2})).input("x", {integer(2)});
  archive.node("torch.ops.aten.add.Tensor", {{"self", tensor("b_total")}, {"other", tensor("x")}},
               {tensor("sum")});
  auto module = load(archive.new_value("sum", "total").output(tensor("sum")));
  module->forward(at::ones({2}));
  const auto result = module->forward(at::ones({2})).toTensor();
  CHECK(at::equal(result, at::full({2}, 2.0F)));
  CHECK(result.is_same(module->named_buffers()["total"]));  // as in Python
  CHECK(at::equal(module->named_buffers()["total"], at::full({2}, 2.0F)));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->eval(); }),
             Contains("updates its buffers itself"));
}

TEST_CASE("Operators can be replaced", "[export]") {
  auto module = load(linear_relu());
  const auto before = ddp::ops::graph_invalidations();
  module->override_operator("aten::relu", [](std::vector<c10::IValue>& stack, bool) {
    const auto x = stack.at(0).toTensor();
    stack = {x.neg()};
  });
  CHECK(ddp::ops::graph_invalidations() == before + 1);  // captured graphs run the old operator
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  CHECK(at::equal(module->forward(at::ones({2, 3})).toTensor(), at::full({2, 2}, -3.0F)));
  CHECK(at::equal(copy->forward(at::ones({2, 3})).toTensor(), at::full({2, 2}, -3.0F)));
}

TEST_CASE("Weights of a module on the stack have names", "[export]") {
  struct Net : torch::nn::Module {
    Net() { register_parameter("w", at::ones({1})); }
  };
  const Net net;
  CHECK(ddp::named_weights(net).count("w") == 1);
}

TEST_CASE("A library with custom operators that cannot be loaded is named", "[export]") {
  CHECK_THAT(message_of<ddp::SettingsError>([] {
               ddp::ExportedModule module(golden("two_inputs/model.pt2"),
                                          ddp::ExportedModuleOptions{{"/none/lib.so"}});
             }),
             Contains("ExportedModuleOptions::libraries") && Contains("/none/lib.so"));
}
