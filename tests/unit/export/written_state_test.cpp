// SPDX-License-Identifier: Apache-2.0
// Buffers and constants that programs write.
#include <torch/torch.h>

#include <memory>
#include <string>

#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;
using testing::TemporaryFolder;

// As run_decompositions() leaves it: y = x * u, and u + 1 is the new u.
TEST_CASE("The backward reads the buffer that the program has replaced", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("u", at::full({1}, 3.0)).input("x", {symbol("s0")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", tensor("b_u")}},
               {tensor("y")});
  archive.node("torch.ops.aten.add.Tensor", {{"self", tensor("b_u")}, {"other", integer(1)}},
               {tensor("next")});
  auto module = load(archive.new_value("next", "u").output(tensor("y")));
  const auto x = at::ones({2}).requires_grad_();
  module->forward(x).toTensor().sum().backward();
  CHECK(at::equal(x.grad(), at::full({2}, 3.0)));
  module->forward(x).toTensor().sum().backward();
  CHECK(at::equal(x.grad(), at::full({2}, 7.0)));
  CHECK(module->buffers()[0].item<double>() == 5);
}

// The forward returns the old value. It must not be the buffer's memory, which has the new one.
TEST_CASE("A program can return the buffer that it replaces", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("u", at::full({1}, 3.0)).input("x", {symbol("s0")});
  archive.node("torch.ops.aten.add.Tensor", {{"self", tensor("b_u")}, {"other", integer(1)}},
               {tensor("next")});
  auto module = load(archive.new_value("next", "u").output(tensor("b_u")));
  const torch::NoGradGuard no_grad;
  CHECK(module->forward(at::ones({2})).toTensor().item<double>() == 3);
  CHECK(module->forward(at::ones({2})).toTensor().item<double>() == 4);
}

TEST_CASE("A program that replaces a parameter does not train it", "[export]") {
  ArchiveBuilder archive;
  archive.parameter("w", at::full({2}, 3.0F)).input("x", {integer(2)});
  archive.node("torch.ops.aten.clamp.default", {{"self", tensor("p_w")}, {"max", integer(2)}},
               {tensor("next")});
  archive.outputs.push_back(tensor("next"));
  archive.output_specs.push_back(
      {{"parameter_mutation", {{"arg", {{"name", "next"}}}, {"parameter_name", "w"}}}});
  auto module = load(archive.output(tensor("next")));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->forward(at::ones({2})); }),
             Contains("a new value of the parameter w,") && Contains("run_decompositions"));
  module->parameters()[0].set_requires_grad(false);
  CHECK(module->forward(at::ones({2})).toTensor()[0].item<float>() == 2);
  CHECK(module->parameters()[0][0].item<float>() == 2);
}

TEST_CASE("The evaluation reads the constant that the training wrote", "[export]") {
  // Python: self.sum = torch.zeros(2) and self.last = self.sum[1:], which are no buffers.
  const auto program = [](const std::string& target, const std::string& constant) {
    ArchiveBuilder archive;
    archive.parameter("w", at::ones({2}));
    archive.constant("sum", at::zeros({2})).constant("last", at::zeros({1}));
    archive.constants["last"]["path_name"] = "tensor_sum";
    archive.constants["last"]["tensor_meta"]["storage_offset"] = integer(1);
    archive.input("x", {integer(2)});
    archive.node(target, {{"self", tensor(constant)}, {"other", tensor("x")}}, {tensor("y")});
    return archive.output(tensor("y"));
  };
  auto archive = program("torch.ops.aten.add_.Tensor", "c_sum");
  archive.evaluation(program("torch.ops.aten.mul.Tensor", "c_last"));
  auto module = load(archive);
  const auto twice = at::full({2}, 2.0F);
  const auto train_and_evaluate = [&](ddp::ExportedModuleImpl& trained) {
    trained.train();
    trained.forward(twice);
    trained.eval();
    return trained.forward(twice).toTensor()[0].item<float>();
  };
  CHECK(train_and_evaluate(*module) == 4);
  module->to(at::kCPU);
  CHECK(train_and_evaluate(*module) == 8);
  const auto copy = std::dynamic_pointer_cast<ddp::ExportedModuleImpl>(module->clone());
  CHECK(train_and_evaluate(*copy) == 12);
  CHECK(train_and_evaluate(*module) == 12);  // the copy has its own
}

TEST_CASE("An archive with an expanded buffer can be saved", "[export]") {
  ArchiveBuilder archive;
  archive.buffer("u", at::full({1}, 3.0F)).input("x", {symbol("s0")});
  archive.weights["u"]["tensor_meta"]["sizes"] = Json::array({integer(2), integer(3)});
  archive.weights["u"]["tensor_meta"]["strides"] = Json::array({integer(0), integer(0)});
  archive.output(tensor("b_u"));
  const TemporaryFolder folder;
  archive.write(folder.file("net.pt2"));
  ddp::ExportedModule module(folder.file("net.pt2"));
  module->buffers()[0].select(0, 0).select(0, 0).fill_(4);
  module->save_archive(folder.file("saved.pt2"));
  const ddp::ExportedModule saved(folder.file("saved.pt2"));
  CHECK(at::equal(saved->buffers()[0], at::full({2, 3}, 4.0F)));
}
