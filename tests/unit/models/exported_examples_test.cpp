// SPDX-License-Identifier: Apache-2.0
// Parts of exported_ddp that need no archive.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "common/evaluation.hpp"
#include "common/sample_loss.hpp"
#include "ddp/ddp.hpp"
#include "exported/exported_settings.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "tensors/model_call.hpp"
#include "tensors/tensor_files.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using Catch::Contains;
using examples::LossKind;
using testing::message_of;

c10::IValue dict_of(const std::vector<std::pair<std::string, at::Tensor>>& entries) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : entries) {
    dict.insert(key, value);
  }
  return dict;
}

torch::Tensor loss_of(LossKind kind, const torch::Tensor& output, const torch::Tensor& target) {
  return examples::sample_loss(kind, output, target, examples::check_target(kind, target, "file"),
                               0)
      .loss;
}

struct Choice {
  ddp::Config cfg;
  examples::ExportedSettings model;
  examples::ExportedTokens tokens;
  examples::TensorFiles tensors;

  Choice() { model.path = "net.pt2"; }
  examples::ExportedData data() const { return examples::choose_data(cfg, model, tokens, tensors); }
  std::string refusal() const {
    return message_of<ddp::SettingsError>([&] { data(); });
  }
};

}  // namespace

TEST_CASE("losses of samples are LibTorch's") {
  torch::manual_seed(1);
  const auto output = torch::randn({6, 4, 3});
  const auto target = torch::rand({6, 4, 3});
  CHECK(torch::equal(loss_of(LossKind::Mse, output, target), torch::mse_loss(output, target)));
  CHECK(torch::equal(loss_of(LossKind::L1, output, target), torch::l1_loss(output, target)));
  CHECK(torch::equal(loss_of(LossKind::Bce, output, target),
                     torch::binary_cross_entropy_with_logits(output, target)));
  // Dimensions of size 1 do not broadcast.
  const auto column = output.flatten().slice(0, 0, 6).reshape({6, 1});
  const auto row = target.flatten().slice(0, 0, 6);
  CHECK(torch::equal(loss_of(LossKind::Mse, column, row), torch::mse_loss(column.flatten(), row)));
  const auto half = loss_of(LossKind::Mse, output.to(torch::kBFloat16), target);
  CHECK(half.scalar_type() == torch::kFloat32);
}

TEST_CASE("cross entropy takes classes in dimension 1 and leaves out ignored labels") {
  torch::manual_seed(2);
  const auto output = torch::randn({2, 5, 3, 4});
  auto target = torch::randint(5, {2, 3, 4}, torch::kInt64);
  const auto plain = examples::check_target(LossKind::CrossEntropy, target, "file");
  CHECK_FALSE(plain.has_ignored);
  CHECK(plain.num_per_sample == 12);
  auto result = examples::sample_loss(LossKind::CrossEntropy, output, target, plain, 0.1);
  CHECK(torch::allclose(result.loss, torch::cross_entropy_loss(output, target, {}, 1, -100, 0.1)));
  CHECK(examples::count_targets(plain, target) == 24);
  CHECK(result.num_correct.item<int64_t>() == output.argmax(1).eq(target).sum().item<int64_t>());

  target[0].fill_(-100);
  const auto facts = examples::check_target(LossKind::CrossEntropy, target, "file");
  CHECK(facts.has_ignored);
  result = examples::sample_loss(LossKind::CrossEntropy, output, target, facts, 0);
  CHECK(torch::allclose(result.loss, torch::cross_entropy_loss(output, target)));
  CHECK(examples::count_targets(facts, target) == 12);

  // A batch without any counted label has the loss 0, not NaN.
  target.fill_(-100);
  result = examples::sample_loss(LossKind::CrossEntropy, output, target, facts, 0);
  CHECK(result.loss.item<float>() == 0);
  CHECK(examples::count_targets(facts, target) == 0);
}

TEST_CASE("losses refuse targets that do not fit") {
  const auto output = torch::zeros({4, 3});
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               loss_of(LossKind::Mse, output, torch::zeros({4, 2}));
             }),
             Contains("model.loss=mse") && Contains("[4, 3]") && Contains("[4, 2]"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               loss_of(LossKind::L1, torch::zeros({4, 1}), torch::zeros({2, 2}));
             }),
             Contains("model.loss=l1"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               loss_of(LossKind::CrossEntropy, torch::zeros({4}), torch::zeros({4}, torch::kInt64));
             }),
             Contains("[N, classes"));
  CHECK_THAT(message_of<ddp::DataError>([&] {
               loss_of(LossKind::CrossEntropy, output, torch::full({4}, 3, torch::kInt64));
             }),
             Contains("label 3") && Contains("3 classes"));
  CHECK_THAT(message_of<ddp::DataError>([&] {
               loss_of(LossKind::CrossEntropy, output, torch::full({4}, -1, torch::kInt64));
             }),
             Contains("file") && Contains("label -1"));
  CHECK_THAT(message_of<ddp::DataError>(
                 [&] { loss_of(LossKind::CrossEntropy, output, torch::zeros({4})); }),
             Contains("int64"));
  CHECK_THAT(message_of<ddp::DataError>([&] {
               loss_of(LossKind::Bce, output, torch::full({4, 3}, 2.0));
             }),
             Contains("0 to 1"));
}

TEST_CASE("model.output selects among a program's outputs") {
  const auto a = torch::zeros({2}), b = torch::ones({});
  CHECK(examples::select_output(a, "").is_same(a));
  CHECK(examples::select_output(a, "0").is_same(a));
  const auto tuple = c10::ivalue::Tuple::create({c10::IValue(3), c10::IValue(a), c10::IValue(b)});
  CHECK(examples::select_output(tuple, "").is_same(a));
  CHECK(examples::select_output(tuple, "2").is_same(b));
  const auto dict = dict_of({{"logits", a}, {"loss", b}});
  CHECK(examples::select_output(dict, "").is_same(a));
  CHECK(examples::select_output(dict, "loss").is_same(b));
  CHECK(torch::equal(examples::loss_in_graph(dict, ""), b));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { examples::select_output(dict, "lost"); }),
             Contains("model.output=lost does not exist") && Contains("logits, loss"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { examples::select_output(tuple, "0"); }),
             Contains("model.output=0 is a Int"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { examples::loss_in_graph(dict, "logits"); }),
             Contains("scalar loss") && Contains("[2]"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { examples::class_scores(a, "", 2); }),
             Contains("[images, classes]"));
  CHECK_THAT(message_of<ddp::DataError>([&] {
               examples::class_scores(torch::zeros({2, 8}), "", 10);
             }),
             Contains("10 classes") && Contains("8"));
}

TEST_CASE("the settings choose one kind of data") {
  Choice choice;
  CHECK(choice.data() == examples::ExportedData::Images);
  choice.tensors.path = "t.safetensors";
  CHECK(choice.data() == examples::ExportedData::Tensors);
  choice.tokens.path = "tokens";
  CHECK_THAT(choice.refusal(), Contains("two kinds of data"));
  choice.tensors.path = "";
  CHECK(choice.data() == examples::ExportedData::Tokens);
  choice.tokens.layout = models::TokenLayout::Pack;
  CHECK_THAT(choice.refusal(), Contains("tokens.layout=pack"));

  choice = {};
  choice.model.path = "";
  CHECK_THAT(choice.refusal(), Contains("model.path is empty"));
  choice = {};
  choice.model.loss = LossKind::Mse;
  CHECK_THAT(choice.refusal(), Contains("model.loss=mse needs the targets of a file"));
  choice.tensors.path = "t.safetensors";
  choice.cfg.train.mixup = 0.2;
  CHECK_THAT(choice.refusal(), Contains("train.mixup"));
  choice.cfg.train.mixup = 0;
  choice.cfg.train.label_smoothing = 0.1;
  CHECK_THAT(choice.refusal(), Contains("train.label_smoothing=0.1 has no effect with "
                                        "model.loss=mse"));
  choice.cfg.train.label_smoothing = 0;
  choice.cfg.checkpoint.keep_best = ddp::KeepBest::Max;
  CHECK_THAT(choice.refusal(),
             Contains("keep_best=max") && Contains("model.loss=mse does not have"));
}

TEST_CASE("files of tensors become rows") {
  const testing::TemporaryFolder folder;
  const auto path = folder.file("train.safetensors"), eval_path = folder.file("eval.safetensors");
  const auto x = torch::arange(20).reshape({10, 2}).to(torch::kFloat32);
  const auto labels = torch::arange(10).remainder(3).to(torch::kInt32);
  ddp::save_safetensors(path, {{"z", x}, {"a", x + 1}, {"target", labels}});
  auto data = examples::open_tensors({.path = path, .eval_rows = 3}, LossKind::CrossEntropy);
  CHECK(data.names == std::vector<std::string>{"a", "z", "target"});
  CHECK(data.train->size() == 7);
  CHECK(data.eval->size() == 3);
  CHECK(torch::equal(data.eval->get(0).tensors.at(1)[0], x[7]));
  CHECK(data.eval->get(0).tensors.at(2).scalar_type() == torch::kInt64);
  CHECK(data.facts.num_classes == 3);

  data = examples::open_tensors({.path = path, .eval_path = path, .target = "z"}, LossKind::Mse);
  CHECK(data.names == std::vector<std::string>{"a", "target", "z"});
  CHECK(data.eval->size() == 10);
  data = examples::open_tensors({.path = path, .eval_path = path}, LossKind::InGraph);
  CHECK(data.names == std::vector<std::string>{"a", "target", "z"});

  const auto refusal = [&](const examples::TensorFiles& files) {
    return message_of<ddp::Error>([&] { examples::open_tensors(files, LossKind::Mse); });
  };
  CHECK_THAT(refusal({.path = path}), Contains("tensors.eval_path is empty"));
  CHECK_THAT(refusal({.path = path, .eval_rows = 10}), Contains("of 10 rows"));
  CHECK_THAT(refusal({.path = path, .eval_rows = 1, .target = "y"}),
             Contains("lacks the target y; it has: a, target, z"));
  ddp::save_safetensors(eval_path, {{"z", x}, {"target", labels}});
  CHECK_THAT(refusal({.path = path, .eval_path = eval_path}), Contains("lacks the tensor a"));
  ddp::save_safetensors(eval_path, {{"z", x}, {"a", x.slice(0, 1)}, {"target", labels}});
  CHECK_THAT(refusal({.path = path, .eval_path = eval_path}), Contains("one row per sample"));
  ddp::save_safetensors(eval_path, {{"z", x}, {"a", x.to(torch::kFloat64)}, {"target", labels}});
  CHECK_THAT(refusal({.path = path, .eval_path = eval_path}), Contains("tensor a is Double"));
}

TEST_CASE("an evaluation without hits has no accuracy") {
  examples::EvaluationSums sums(at::kCPU);
  sums.add({.loss = torch::full({}, 6.0), .num_targets = {.on_host = 3}});
  const auto values = sums.values();
  const examples::EvalResult result{
      .loss = 2, .accuracy = values[1].item<double>() / 3, .num_targets = 3};
  CHECK_FALSE(examples::epoch_metrics(result).test_accuracy.has_value());
  CHECK(examples::epoch_metrics(result).test_loss == 2);
  CHECK(examples::epoch_metrics({.loss = 1, .accuracy = 0.5}).test_accuracy == 0.5);
}
