// SPDX-License-Identifier: Apache-2.0
// ResNets compared with torchvision's; both sides create the weights by the same formula.
#include "models/resnet.hpp"

#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "formula.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using nlohmann::json;

namespace {

const json& golden() {
  static const json parsed = [] {
    std::ifstream file(DDP_GOLDEN_DIR "/resnet.json");
    return json::parse(file);
  }();
  return parsed;
}

models::ResNet make_filled(const json& expected) {
  models::ResNetOptions options{.num_classes = 10};
  options.stem = expected["stem"] == "cifar" ? models::Stem::Cifar : models::Stem::Imagenet;
  auto model = models::make_resnet(expected["model"], options);
  formula::fill(*model);
  return model;
}

torch::Tensor images(const json& expected, int64_t batch) {
  const int64_t size = expected["size"];
  return formula::uniform("input", {batch, 3, size, size}) * 4;
}

double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

torch::Tensor to_tensor(const json& values) {
  return torch::tensor(values.get<std::vector<double>>(), torch::kFloat64);
}

}  // namespace

TEST_CASE("state keys and shapes are torchvision's, in its order") {
  for (const auto& expected : golden()["eval"]) {
    INFO(expected["model"] << " " << expected["stem"]);
    const auto keys = formula::keys_of(*make_filled(expected));
    CHECK(keys.size() == expected["num_keys"].get<std::size_t>());
    if (expected.contains("keys")) {
      CHECK(keys == expected["keys"].get<std::vector<std::string>>());
    }
    std::string joined;
    for (const auto& key : keys) {
      joined += (joined.empty() ? "" : "\n") + key;
    }
    CHECK(formula::fnv1a(joined) == expected["keys_fnv1a"].get<uint32_t>());
  }
}

TEST_CASE("eval output equals torchvision's") {
  torch::NoGradGuard no_grad;
  for (const auto& expected : golden()["eval"]) {
    INFO(expected["model"] << " " << expected["stem"]);
    auto model = make_filled(expected);
    model->eval();
    const auto reference = to_tensor(expected["output"]).view({2, 10});
    const auto output = model->forward(images(expected, 2)).to(torch::kFloat64);
    CHECK(relative_difference(output, reference) <= 1e-5);
    models::to_channels_last(*model);
    const auto x = images(expected, 2).contiguous(at::MemoryFormat::ChannelsLast);
    const auto nhwc = model->forward(x).to(torch::kFloat64);
    CHECK(relative_difference(nhwc, reference) <= 1e-5);
  }
}

// In float64: gradients pass through batch statistics of few values, which amplify float32's
// roundings. These depend on the processor, by up to 1 % of resnet50's gradients.
TEST_CASE("train-mode loss, gradients and running statistics equal torchvision's") {
  for (const auto& expected : golden()["train"]) {
    INFO(expected["model"]);
    auto model = make_filled(expected);
    model->to(torch::kFloat64);
    model->train();
    const auto output = model->forward(images(expected, 4).to(torch::kFloat64));
    const auto target = torch::tensor({1, 3, 5, 7}, torch::kInt64);
    auto loss = torch::cross_entropy_loss(output, target, {}, at::Reduction::Mean, -100, 0.1);
    loss.backward();
    CHECK(loss.item<double>() == Approx(expected["loss"].get<double>()).epsilon(1e-9));
    for (const auto& item : model->named_parameters()) {
      INFO(item.key());
      const auto& reference = expected["grads"][item.key()];
      const auto norm = reference["norm"].get<double>();
      const auto& grad = item.value().grad();
      CHECK(grad.norm().item<double>() == Approx(norm).epsilon(1e-9));
      const auto first = grad.flatten().slice(0, 0, 4);
      const auto scale = norm / std::sqrt(static_cast<double>(grad.numel()));
      const auto difference = (first - to_tensor(reference["first"])).abs().max();
      CHECK(difference.item<double>() <= 1e-8 * scale);
    }
    for (const auto& item : model->named_buffers()) {
      INFO(item.key());
      const auto norm = item.value().to(torch::kFloat64).norm().item<double>();
      CHECK(norm == Approx(expected["buffers"][item.key()].get<double>()).epsilon(1e-9));
    }
  }
}

// Equal seeds give torchvision's weights, because random numbers are drawn in its order.
TEST_CASE("initial weights equal torchvision's for one seed") {
  for (const auto& expected : golden()["init"]) {
    torch::manual_seed(1234);
    const bool zero_init = expected["zero_init_residual"];
    auto model = models::make_resnet(expected["model"],
                                     {.num_classes = 10, .zero_init_residual = zero_init});
    for (const auto& item : model->named_parameters()) {
      INFO(item.key());
      const auto value = item.value().to(torch::kFloat64);
      const auto sums = expected["sums"][item.key()].get<std::vector<double>>();
      CHECK(value.sum().item<double>() == Approx(sums[0]).epsilon(1e-6).margin(1e-6 * sums[1]));
      CHECK(value.abs().sum().item<double>() == Approx(sums[1]).epsilon(1e-6));
    }
  }
}

TEST_CASE("each training forward counts one batch, eval none") {
  const auto x = formula::uniform("input", {2, 3, 32, 32});
  for (const bool side_streams : {false, true}) {
    auto model = models::resnet18({.num_classes = 2, .side_streams = side_streams});
    model->forward(x);
    model->forward(x);
    model->eval();
    model->forward(x);
    int counters = 0;
    for (const auto& item : model->named_buffers()) {
      if (formula::ends_with(item.key(), "num_batches_tracked")) {
        CHECK(item.value().item<int64_t>() == 2);
        ++counters;
      }
    }
    CHECK(counters == 20);
    model->norm("bn1")->train();  // a layer counts for itself, as in PyTorch
    model->forward(x);
    CHECK(model->named_buffers()["bn1.num_batches_tracked"].item<int64_t>() == 3);
  }
}

TEST_CASE("frozen normalisation layers neither count nor move") {
  auto model = models::resnet18({.num_classes = 2});
  for (auto& module : model->modules()) {
    if (auto* bn = module->as<torch::nn::BatchNorm2dImpl>()) {
      bn->eval();
    }
  }
  model->forward(formula::uniform("input", {2, 3, 32, 32}));
  for (const auto& item : model->named_buffers()) {
    const bool is_var = formula::ends_with(item.key(), "running_var");
    CHECK(item.value().to(torch::kFloat64).eq(is_var ? 1.0 : 0.0).all().item<bool>());
  }
}

TEST_CASE("the norm factory's layers are used and can be replaced") {
  int made = 0;
  auto model = models::resnet50({.num_classes = 3, .norm = [&](int64_t channels) {
                                   ++made;
                                   return torch::nn::AnyModule(torch::nn::GroupNorm(8, channels));
                                 }});
  CHECK(made == 53);
  CHECK(model->named_buffers().size() == 0);
  CHECK(model->forward(formula::uniform("input", {2, 3, 32, 32})).sizes() ==
        at::IntArrayRef({2, 3}));

  int replaced = 0;
  for (auto& module : model->modules()) {
    if (auto* owner = dynamic_cast<ddp::ops::NormOwner*>(module.get())) {
      for (const auto& name : owner->norm_names()) {
        CHECK(owner->norm(name)->as<torch::nn::GroupNormImpl>() != nullptr);
        owner->replace_norm(name, torch::nn::AnyModule(torch::nn::Identity()));
        ++replaced;
      }
      CHECK_THROWS_AS(owner->norm("nothing"), std::invalid_argument);
    }
  }
  CHECK(replaced == 53);
  CHECK(model->named_parameters().size() == 53 + 2);  // the convolutions, fc's weight and bias
}

namespace {

/// A user's own norm: BatchNorm's parameters and buffers, another forward.
class PlainScaleImpl : public torch::nn::BatchNorm2dImpl {
 public:
  using torch::nn::BatchNorm2dImpl::BatchNorm2dImpl;
  torch::Tensor forward(const torch::Tensor& input) {
    ++calls;
    return input * weight.view({1, -1, 1, 1});
  }
  int calls = 0;
};
TORCH_MODULE(PlainScale);

}  // namespace

TEST_CASE("a norm derived from BatchNorm2d keeps its own forward") {
  std::vector<PlainScale> norms;
  auto model = models::resnet18({.num_classes = 2, .norm = [&](int64_t channels) {
                                   norms.emplace_back(PlainScale(channels));
                                   return torch::nn::AnyModule(norms.back());
                                 }});
  model->forward(formula::uniform("input", {2, 3, 32, 32}));
  CHECK(norms.size() == 20);
  for (const auto& norm : norms) {
    CHECK(norm->calls == 1);
    CHECK(norm->running_mean.abs().max().item<float>() == 0);
  }
}

TEST_CASE("a norm whose momentum is taken away averages over its batches") {
  auto model = models::resnet18({.num_classes = 2, .stem = models::Stem::Cifar});
  const auto x = formula::uniform("input", {2, 3, 16, 16});
  auto* norm = model->norm("bn1")->as<torch::nn::BatchNorm2d>();
  model->forward(x);
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);
  const auto first = norm->running_mean.clone();  // moved by a tenth of the batch's
  norm->options.momentum(std::nullopt);
  norm->reset_running_stats();
  model->forward(x);
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);
  CHECK(torch::allclose(norm->running_mean, 10 * first, 1e-4, 1e-5));
}

TEST_CASE("a ResNet of other than four stages is refused") {
  CHECK_THROWS_WITH(models::ResNet(models::ResNetOptions{}, std::vector<int64_t>{2, 2}, false),
                    Catch::Contains("has 2 entries"));
}

TEST_CASE("a ResNet takes images of another number of channels") {
  const auto stem = GENERATE(models::Stem::Imagenet, models::Stem::Cifar);
  const bool fused_ops = GENERATE(true, false);
  auto model =
      models::resnet18({.num_classes = 4, .in_channels = 1, .stem = stem, .fused_ops = fused_ops});
  auto parameters = model->named_parameters();
  CHECK(parameters["conv1.weight"].size(1) == 1);
  // The same function of an image whose second and third channel are black.
  auto rgb = models::resnet18({.num_classes = 4, .stem = stem, .fused_ops = fused_ops});
  {
    torch::NoGradGuard no_grad;
    for (auto& item : rgb->named_parameters()) {
      auto values = item.value();
      (item.key() == "conv1.weight" ? values.narrow(1, 0, 1) : values)
          .copy_(parameters[item.key()]);
    }
  }
  const auto x = formula::uniform("input", {4, 1, 28, 28});
  const auto coloured = torch::cat({x, torch::zeros({4, 2, 28, 28})}, 1);
  CHECK(torch::allclose(model->forward(x), rgb->forward(coloured), 1e-4, 1e-4));
  model->forward(x).sum().backward();
  CHECK(parameters["conv1.weight"].grad().abs().sum().item<float>() > 0);
}

TEST_CASE("a clone has the same values and its own memory") {
  auto model = models::resnet18({.num_classes = 4, .stem = models::Stem::Cifar});
  const auto x = formula::uniform("input", {2, 3, 16, 16});
  auto copy = std::dynamic_pointer_cast<models::ResNetImpl>(model->clone());
  REQUIRE(copy != nullptr);
  CHECK(torch::equal(copy->forward(x), model->forward(x)));
  const auto ours = formula::state_of(*model);
  const auto theirs = formula::state_of(*copy);
  REQUIRE(ours.size() == theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    INFO(ours[i].first);
    CHECK(ours[i].first == theirs[i].first);
    CHECK(torch::equal(ours[i].second, theirs[i].second));
    CHECK(ours[i].second.data_ptr() != theirs[i].second.data_ptr());
  }
}

TEST_CASE("half weights keep normalisation in float32 and follow the float32 model") {
  torch::NoGradGuard no_grad;
  auto model = models::resnet18({.num_classes = 4, .norm = [](int64_t channels) {
                                   return torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
                                 }});
  auto half = std::dynamic_pointer_cast<models::ResNetImpl>(model->clone());
  models::to_channels_last(*half);
  models::to_half_but_norms(*half, torch::kBFloat16);
  for (const auto& item : half->named_parameters()) {
    INFO(item.key());
    const bool norm = formula::ends_with(item.key(), "fc.bias") ? false : item.value().dim() == 1;
    CHECK(item.value().scalar_type() == (norm ? torch::kFloat : torch::kBFloat16));
    CHECK(item.value().is_contiguous(at::MemoryFormat::ChannelsLast) == (item.value().dim() == 4));
  }
  for (const auto& item : half->named_buffers()) {
    CHECK(item.value().scalar_type() != torch::kBFloat16);
  }
  const auto x = formula::uniform("input", {4, 3, 64, 64}) * 4;
  const auto expected = model->forward(x);
  const auto logits = half->forward(x.contiguous(at::MemoryFormat::ChannelsLast));
  CHECK(logits.scalar_type() == torch::kBFloat16);
  CHECK(relative_difference(logits.to(torch::kFloat), expected) < 0.05);
  CHECK_THROWS_AS(models::to_half_but_norms(*half, torch::kFloat), std::invalid_argument);
}

TEST_CASE("wrong options are refused with the setting's name") {
  using models::make_resnet;
  const auto message_of = [](const auto& make) {
    return testing::message_of<std::invalid_argument>(make);
  };
  CHECK(message_of([] { make_resnet("resnet18", {.num_classes = 0}); }).find("num_classes = 0") !=
        std::string::npos);
  CHECK(message_of([] { make_resnet("resnet18", {.in_channels = 0}); }).find("in_channels = 0") !=
        std::string::npos);
  CHECK(message_of([] { make_resnet("resnet19"); }).find("resnet18, resnet34") !=
        std::string::npos);
}
