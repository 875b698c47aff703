// SPDX-License-Identifier: Apache-2.0
// train() and eval() of programs that were exported in one mode, or in both.
#include <torch/torch.h>

#include "ddp/export/exported_module.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;
using testing::TemporaryFolder;

namespace {

// y = target(first = x, arguments…)
ArchiveBuilder one_node(const std::string& target, const std::string& first,
                        std::vector<std::pair<std::string, Json>> arguments) {
  ArchiveBuilder archive;
  archive.input("x", {symbol("s0"), integer(2), integer(8)});
  arguments.insert(arguments.begin(), {first, tensor("x")});
  archive.node(target, arguments, {tensor("y")}).output(tensor("y"));
  return archive;
}

ArchiveBuilder batch_norm(bool training) {
  ArchiveBuilder archive;
  archive.buffer("norm.running_mean", at::zeros({2})).buffer("norm.running_var", at::ones({2}));
  archive.buffer("norm.num_batches_tracked", at::zeros({}, at::kLong));
  archive.input("x", {symbol("s0"), integer(2), integer(8)});
  if (training) {
    archive.node("torch.ops.aten.add_.Tensor",
                 {{"self", tensor("b_norm_num_batches_tracked")}, {"other", integer(1)}},
                 {tensor("counted")});
  }
  archive.node("torch.ops.aten.batch_norm.default",
               {{"input", tensor("x")},
                {"weight", {{"as_none", true}}},
                {"bias", {{"as_none", true}}},
                {"running_mean", tensor("b_norm_running_mean")},
                {"running_var", tensor("b_norm_running_var")},
                {"training", truth(training)},
                {"momentum", number(0.5)},
                {"eps", number(1e-5)},
                {"cudnn_enabled", truth(false)}},
               {tensor("y")});
  archive.output(tensor("y"));
  return archive;
}

at::Tensor samples() {
  return at::arange(1, 65, at::kFloat).view({4, 2, 8});
}

bool changes_input(ddp::ExportedModule& module) {
  return !at::equal(module->forward(samples()).toTensor(), samples());
}

}  // namespace

TEST_CASE("Dropout works in training and not in evaluation, whatever the export's mode",
          "[export]") {
  for (const bool training : {true, false}) {
    auto module = load(one_node("torch.ops.aten.dropout.default", "input",
                                {{"p", number(0.5)}, {"train", truth(training)}}));
    CHECK(module->is_training() == training);
    module->train();
    CHECK(changes_input(module));
    module->eval();
    CHECK_FALSE(changes_input(module));
    module->train();
    CHECK(changes_input(module));
  }
}

TEST_CASE("Attention drops nothing in evaluation", "[export]") {
  auto module =
      load(one_node("torch.ops.aten.scaled_dot_product_attention.default", "query",
                    {{"key", tensor("x")}, {"value", tensor("x")}, {"dropout_p", number(0.5)}}));
  const auto expected = at::scaled_dot_product_attention(samples(), samples(), samples());
  CHECK_FALSE(at::equal(module->forward(samples()).toTensor(), expected));
  module->eval();
  CHECK(at::equal(module->forward(samples()).toTensor(), expected));
}

TEST_CASE("Batch normalization follows the mode and counts batches in training", "[export]") {
  for (const bool training : {true, false}) {
    auto module = load(batch_norm(training));
    CHECK(module->is_training() == training);
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(2).affine(false).momentum(0.5));
    for (const bool train : {true, true, false, true}) {
      module->train(train);
      norm->train(train);
      CHECK(at::equal(module->forward(samples()).toTensor(), norm->forward(samples())));
    }
    CHECK(at::equal(module->named_buffers()["norm.running_mean"], norm->running_mean));
    CHECK(at::equal(module->named_buffers()["norm.running_var"], norm->running_var));
    CHECK(module->named_buffers()["norm.num_batches_tracked"].item<int64_t>() == 3);
  }
}

TEST_CASE("Instance normalization without statistics has no mode", "[export]") {
  const Json none = {{"as_none", true}};
  auto module = load(one_node("torch.ops.aten.instance_norm.default", "input",
                              {{"weight", none},
                               {"bias", none},
                               {"running_mean", none},
                               {"running_var", none},
                               {"use_input_stats", truth(true)},
                               {"momentum", number(0.1)},
                               {"eps", number(1e-5)},
                               {"cudnn_enabled", truth(false)}}));
  const auto trained = module->forward(samples()).toTensor();
  module->eval();
  CHECK(at::equal(module->forward(samples()).toTensor(), trained));
}

TEST_CASE("eval() refuses random operators whose place it cannot know", "[export]") {
  auto module = load(one_node("torch.ops.aten.bernoulli.default", "self", {}));
  CHECK_THAT(
      message_of<ddp::SettingsError>([&] { module->eval(); }),
      Contains("aten.bernoulli") && Contains("net.py\", line 7") && Contains("export both modes"));
  CHECK(module->is_training());
}

TEST_CASE("eval() refuses buffers that the program updates itself", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("mask", at::zeros({2})).input("x", {integer(2)});
  archive.node("torch.ops.aten.detach.default", {{"self", tensor("b_mask")}}, {tensor("view")});
  archive.node("torch.ops.aten.add_.Tensor", {{"self", tensor("view")}, {"other", tensor("x")}},
               {tensor("y")});
  archive.output(tensor("y"));
  auto module = load(archive);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->eval(); }),
             Contains("changes the buffer mask") && Contains("export both modes"));
}

TEST_CASE("train() refuses what an evaluating program does not say", "[export]") {
  auto archive = one_node("torch.ops.aten.dropout.default", "input",
                          {{"p", number(0.5)}, {"train", truth(false)}});
  archive.node("torch.ops.aten.scaled_dot_product_attention.default",
               {{"query", tensor("x")}, {"key", tensor("x")}, {"value", tensor("x")}},
               {tensor("z")});
  auto module = load(archive);
  CHECK_FALSE(module->is_training());
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->train(); }),
             Contains("scaled_dot_product_attention") && Contains("export both modes"));
  CHECK_FALSE(module->is_training());
}

TEST_CASE("A norm that is used twice counts and evaluates", "[export]") {
  auto archive = batch_norm(true);
  // As Python traces a second call: it counts in the result of the first.
  archive.node("torch.ops.aten.add_.Tensor", {{"self", tensor("counted")}, {"other", integer(1)}},
               {tensor("counted_again")});
  archive.node("torch.ops.aten.mul.Tensor",
               {{"self", tensor("y")}, {"other", tensor("counted_again")}}, {tensor("z")});
  archive.output(tensor("z"));
  auto module = load(archive);
  module->forward(samples());
  CHECK(module->named_buffers()["norm.num_batches_tracked"].item<int64_t>() == 2);
  module->eval();
  module->forward(samples());
  CHECK(module->named_buffers()["norm.num_batches_tracked"].item<int64_t>() == 2);
}

TEST_CASE("A region's operators follow the mode", "[export]") {
  const auto inner = one_node("torch.ops.aten.dropout.default", "input",
                              {{"p", number(0.5)}, {"train", truth(true)}});
  ArchiveBuilder archive;
  archive.input("x", {symbol("s0"), integer(2), integer(8)});
  archive.node("torch.ops.higher_order.wrap_with_set_grad_enabled",
               {{"", truth(false)}, {"", graph_argument(inner)}, {"", tensor("x")}}, {tensor("y")});
  archive.output(tensor("y"));
  auto module = load(archive);
  CHECK(module->is_training());
  CHECK(changes_input(module));
  module->eval();
  CHECK_FALSE(changes_input(module));
}

TEST_CASE("An archive of both modes is evaluated by its own program", "[export]") {
  auto archive = linear_relu();
  auto eval = linear_relu();
  eval.nodes[1]["target"] = "torch.ops.aten.tanh.default";
  archive.evaluation(eval);
  archive.others["data/weights/eval_weights_config.json"] =
      Json{{"config", archive.weights}}.dump();
  auto module = load(archive);
  const auto x = at::ones({2, 3});
  CHECK(at::equal(module->forward(x).toTensor(), at::full({2, 2}, 3.0F)));
  module->eval();
  CHECK(at::equal(module->forward(x).toTensor(), at::full({2, 2}, 3.0F).tanh()));
  torch::nn::init::constant_(module->named_parameters()["fc.weight"], 0.0);
  CHECK(at::equal(module->forward(x).toTensor(), at::zeros({2, 2})));

  eval.parameter("other", at::ones({1}));
  archive.others["models/eval.json"] = eval.program().dump();
  CHECK_THAT(message_of<ddp::DataError>([&] { load(archive); }),
             Contains("eval") && Contains("tensor other"));
}

namespace {

// Arguments by name, and results.
struct Call {
  std::string target;
  std::vector<std::pair<std::string, Json>> arguments;
  std::vector<Json> results;
};

std::string refusal_of_eval(const std::vector<Call>& calls) {
  ArchiveBuilder archive;
  archive.buffer("mask", at::ones({4, 6})).input("x", {integer(2)});
  for (const auto& [target, arguments, results] : calls) {
    archive.node(target, arguments, results);
  }
  auto module = load(archive.output(tensor("x")));
  CHECK(module->is_training());
  return message_of<ddp::SettingsError>([&] { module->eval(); });
}

Json list_result(const std::vector<std::string>& names) {
  return list_of(names);
}

// detach inside a region: the result is a view of the region's argument.
ArchiveBuilder view_region() {
  ArchiveBuilder inner;
  inner.input("v", {integer(4), integer(6)});
  inner.node("torch.ops.aten.detach.default", {{"self", tensor("v")}}, {tensor("detached")});
  inner.output(tensor("detached"));
  return inner;
}

const Call kAddToPart = {"torch.ops.aten.add_.Scalar",
                         {{"self", tensor("part")}, {"other", number(1)}},
                         {tensor("written")}};

}  // namespace

TEST_CASE("eval() follows buffers through lists, regions and operators that may be views",
          "[export]") {
  const auto mask = tensor("b_mask");
  const std::vector<Call> views = {
      {"torch.ops.aten.split.Tensor",
       {{"self", mask}, {"split_size", integer(2)}},
       {list_result({"other", "part"})}},
      {"torch.ops.aten.chunk.default",
       {{"self", mask}, {"chunks", integer(2)}},
       {list_result({"part", "other"})}},
      {"torch.ops.aten.unbind.int", {{"self", mask}}, {list_result({"a", "b", "part", "c"})}},
      {"torch.ops.aten.broadcast_tensors.default",
       {{"tensors", list_of({"b_mask"})}},
       {list_result({"part"})}},
      {"torch.ops.aten.dropout.default",
       {{"input", mask}, {"p", number(0)}, {"train", truth(true)}},
       {tensor("part")}},
      {"torch.ops.higher_order.wrap_with_set_grad_enabled",
       {{"", truth(false)}, {"", graph_argument(view_region())}, {"", mask}},
       {tensor("part")}},
  };
  for (const auto& view : views) {
    CAPTURE(view.target);
    CHECK_THAT(refusal_of_eval({view, kAddToPart}), Contains("changes the buffer mask"));
  }
  CHECK_THAT(refusal_of_eval({{"torch.ops.aten._foreach_add_.Scalar",
                               {{"self", list_of({"x", "b_mask"})}, {"scalar", number(1)}},
                               {}}}),
             Contains("changes the buffer mask"));
  // A copy may change.
  CHECK(refusal_of_eval(
            {{"torch.ops.aten.clone.default", {{"self", mask}}, {tensor("part")}}, kAddToPart})
            .empty());
}

TEST_CASE("A norm that counts in a region and outside counts in training only", "[export]") {
  ArchiveBuilder inner;
  inner.input("count", {});
  inner.node("torch.ops.aten.add_.Tensor", {{"self", tensor("count")}, {"other", integer(1)}},
             {tensor("counted")});
  inner.output(tensor("counted"));
  auto archive = batch_norm(true);
  archive.node("torch.ops.higher_order.wrap_with_set_grad_enabled",
               {{"", truth(false)}, {"", graph_argument(inner)}, {"", tensor("counted")}},
               {tensor("counted_inside")});
  archive.node("torch.ops.aten.add_.Tensor",
               {{"self", tensor("counted_inside")}, {"other", integer(1)}}, {tensor("last")});
  auto module = load(archive);
  module->forward(samples());
  CHECK(module->named_buffers()["norm.num_batches_tracked"].item<int64_t>() == 3);
  module->eval();
  module->forward(samples());
  CHECK(module->named_buffers()["norm.num_batches_tracked"].item<int64_t>() == 3);
}

TEST_CASE("rrelu draws slopes in training only, also where the export left out its mode",
          "[export]") {
  auto module = load(one_node("torch.ops.aten.rrelu.default", "self",
                              {{"lower", number(0.1)}, {"upper", number(0.3)}}));
  CHECK_FALSE(module->is_training());
  const auto x = -samples();
  CHECK(at::allclose(module->forward(x).toTensor(), x * 0.2));
  module->train();
  CHECK_FALSE(at::allclose(module->forward(x).toTensor(), x * 0.2));
  module->eval();
  CHECK(at::allclose(module->forward(x).toTensor(), x * 0.2));
}

TEST_CASE("Decomposed norms say the mode of their program", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("norm.running_mean", at::zeros({2})).buffer("norm.running_var", at::ones({2}));
  archive.input("x", {symbol("s0"), integer(2), integer(8)});
  const Json none = {{"as_none", true}};
  archive.node("torch.ops.aten._native_batch_norm_legit_no_training.default",
               {{"input", tensor("x")},
                {"weight", none},
                {"bias", none},
                {"running_mean", tensor("b_norm_running_mean")},
                {"running_var", tensor("b_norm_running_var")},
                {"momentum", number(0.5)},
                {"eps", number(1e-5)}},
               {tensor("y"), tensor("mean"), tensor("invstd")});
  auto module = load(archive.output(tensor("y")));
  CHECK_FALSE(module->is_training());
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->train(); }),
             Contains("only evaluates") && Contains("export both modes"));

  ArchiveBuilder without_estimates;
  without_estimates.input("x", {symbol("s0"), integer(2), integer(8)});
  without_estimates.node("torch.ops.aten._native_batch_norm_legit.no_stats",
                         {{"input", tensor("x")},
                          {"weight", none},
                          {"bias", none},
                          {"training", truth(true)},
                          {"momentum", number(0.5)},
                          {"eps", number(1e-5)}},
                         {tensor("y"), tensor("mean"), tensor("invstd")});
  module = load(without_estimates.output(tensor("y")));
  const auto trained = module->forward(samples()).toTensor();
  module->eval();
  CHECK(at::equal(module->forward(samples()).toTensor(), trained));
}

TEST_CASE("The exporter's note says the mode of a program", "[export]") {
  const auto noted = [](ArchiveBuilder archive, const std::string& mode) {
    archive.others["extra/libddp_mode"] = mode;
    return load(archive);
  };
  auto module = noted(linear_relu(), "eval");
  CHECK_FALSE(module->is_training());
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->train(); }),
             Contains("no operator has a mode") && Contains("export both modes"));
  CHECK_FALSE(module->is_training());

  CHECK(noted(linear_relu(), "train")->is_training());
  CHECK(noted(batch_norm(false), "train")->is_training());  // a frozen norm
  module = noted(batch_norm(false), "eval");
  CHECK_FALSE(module->is_training());
  module->train();
  CHECK(module->is_training());
  CHECK_THAT(message_of<ddp::DataError>([&] { noted(linear_relu(), "both modes"); }),
             Contains("libddp_mode is both modes") && Contains("train, eval and both"));
}
