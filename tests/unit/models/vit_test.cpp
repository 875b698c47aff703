// SPDX-License-Identifier: Apache-2.0
// Vision Transformers compared with a plain statement of torchvision's in LibTorch's ops. The test
// interchange_torchvision compares with torchvision itself.
#include "models/vit.hpp"

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "formula.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

namespace {

models::VitOptions tiny() {
  models::VitOptions o;
  o.image_size = 12;
  o.patch_size = 4;
  o.num_classes = 5;
  o.hidden_size = 16;
  o.num_layers = 3;
  o.num_heads = 2;
  return o;
}

/// In float64 with noise in every parameter: the initial head of zeros would hide everything.
models::Vit noisy(const models::VitOptions& options) {
  torch::manual_seed(5);
  models::Vit model(options, torch::kFloat64);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    parameter.add_(torch::randn_like(parameter), 0.2);
  }
  return model;
}

torch::Tensor random_images(int64_t batch, int64_t size) {
  return torch::randn({batch, 3, size, size}, torch::kFloat64);
}

/// torchvision's forward in eval mode.
torch::Tensor plain_forward(models::VitImpl& model, const torch::Tensor& images) {
  const auto p = model.named_parameters();
  const auto& o = model.options();
  const auto norm = [&](const torch::Tensor& x, const std::string& name) {
    return torch::layer_norm(x, {o.hidden_size}, p[name + ".weight"], p[name + ".bias"], 1e-6);
  };
  const auto linear = [&](const torch::Tensor& x, const std::string& name) {
    return torch::linear(x, p[name + ".weight"], p[name + ".bias"]);
  };
  auto x = torch::conv2d(images, p["conv_proj.weight"], p["conv_proj.bias"], o.patch_size)
               .flatten(2)
               .transpose(1, 2);
  x = torch::cat({p["class_token"].expand({images.size(0), -1, -1}), x}, 1);
  x = x + p["encoder.pos_embedding"];
  for (int64_t i = 0; i < o.num_layers; ++i) {
    const auto layer = "encoder.layers.encoder_layer_" + std::to_string(i);
    const auto attention = layer + ".self_attention";
    const auto qkv = torch::linear(norm(x, layer + ".ln_1"), p[attention + ".in_proj_weight"],
                                   p[attention + ".in_proj_bias"])
                         .chunk(3, -1);
    const auto heads = [&](const torch::Tensor& t) {
      return t.reshape({t.size(0), t.size(1), o.num_heads, -1}).transpose(1, 2);
    };
    const double scale =
        1 / std::sqrt(static_cast<double>(o.hidden_size) / static_cast<double>(o.num_heads));
    const auto scores = heads(qkv[0]).matmul(heads(qkv[1]).transpose(2, 3)) * scale;
    const auto read = scores.softmax(-1).matmul(heads(qkv[2])).transpose(1, 2).flatten(2);
    x = x + linear(read, attention + ".out_proj");
    x = x +
        linear(torch::gelu(linear(norm(x, layer + ".ln_2"), layer + ".mlp.0")), layer + ".mlp.3");
  }
  return linear(norm(x, "encoder.ln").select(1, 0), "heads.head");
}

double difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace

TEST_CASE("a ViT's state keys and shapes are torchvision's, in its order") {
  auto options = tiny();
  options.num_layers = 1;
  const std::string layer = "encoder.layers.encoder_layer_0.";
  CHECK(formula::keys_of(*models::Vit(options)) ==
        std::vector<std::string>{"class_token [1, 1, 16]",
                                 "conv_proj.weight [16, 3, 4, 4]",
                                 "conv_proj.bias [16]",
                                 "encoder.pos_embedding [1, 10, 16]",
                                 layer + "ln_1.weight [16]",
                                 layer + "ln_1.bias [16]",
                                 layer + "self_attention.in_proj_weight [48, 16]",
                                 layer + "self_attention.in_proj_bias [48]",
                                 layer + "self_attention.out_proj.weight [16, 16]",
                                 layer + "self_attention.out_proj.bias [16]",
                                 layer + "ln_2.weight [16]",
                                 layer + "ln_2.bias [16]",
                                 layer + "mlp.0.weight [64, 16]",
                                 layer + "mlp.0.bias [64]",
                                 layer + "mlp.3.weight [16, 64]",
                                 layer + "mlp.3.bias [16]",
                                 "encoder.ln.weight [16]",
                                 "encoder.ln.bias [16]",
                                 "heads.head.weight [5, 16]",
                                 "heads.head.bias [5]"});
}

TEST_CASE("the named ViTs have the papers' numbers of parameters") {
  // B and L: torchvision's documentation. Ti and S: table 1 of DeiT (5M and 22M), counted exactly.
  const std::map<std::string, int64_t> expected = {{"vit_ti_16", 5717416},
                                                   {"vit_s_16", 22050664},
                                                   {"vit_b_16", 86567656},
                                                   {"vit_b_32", 88224232},
                                                   {"vit_l_16", 304326632}};
  for (const auto& [name, count] : expected) {
    INFO(name);
    int64_t sum = 0;
    const models::Vit model(models::vit_options(name), torch::device(torch::kMeta));
    for (const auto& parameter : model->parameters()) {
      sum += parameter.numel();
    }
    CHECK(sum == count);
  }
}

TEST_CASE("a ViT's output and gradients equal the plain statement's") {
  auto model = noisy(tiny());
  for (const bool channels_last : {false, true}) {
    auto images = random_images(3, 12);
    if (channels_last) {
      images = images.contiguous(at::MemoryFormat::ChannelsLast);
    }
    auto theirs_images = images.clone().requires_grad_();
    images.requires_grad_();
    const auto seed = torch::randn({3, 5}, torch::kFloat64);
    model->zero_grad();
    const auto output = model->forward(images);
    output.backward(seed);
    std::map<std::string, torch::Tensor> grads;
    for (const auto& item : model->named_parameters()) {
      grads[item.key()] = item.value().grad().clone();
    }
    model->zero_grad();
    const auto expected = plain_forward(*model, theirs_images);
    expected.backward(seed);
    CHECK(difference(output, expected) <= 1e-10);
    CHECK(difference(images.grad(), theirs_images.grad()) <= 1e-10);
    for (const auto& item : model->named_parameters()) {
      INFO(item.key());
      CHECK(item.value().grad().abs().max().item<double>() > 1e-6);
      CHECK(difference(grads[item.key()], item.value().grad()) <= 1e-10);
    }
  }
}

TEST_CASE("a ViT's initial weights have torchvision's distributions") {
  torch::manual_seed(7);
  auto options = models::vit_options("vit_s_16");
  options.num_layers = 1;
  const auto p = models::Vit(options)->named_parameters();
  const auto std_of = [&](const std::string& name) { return p[name].std().item<double>(); };
  const auto bound_of = [&](const std::string& name) { return p[name].abs().max().item<double>(); };
  const std::string layer = "encoder.layers.encoder_layer_0.";
  CHECK(std_of("conv_proj.weight") == Approx(std::sqrt(1.0 / 768)).epsilon(0.02));
  CHECK(std_of("encoder.pos_embedding") == Approx(0.02).epsilon(0.02));
  CHECK(bound_of(layer + "self_attention.in_proj_weight") ==
        Approx(std::sqrt(6.0 / (384 + 3 * 384))).epsilon(0.01));
  CHECK(bound_of(layer + "self_attention.out_proj.weight") ==
        Approx(std::sqrt(1.0 / 384)).epsilon(0.01));
  for (const auto* name : {"mlp.0", "mlp.3"}) {
    CHECK(bound_of(layer + name + ".weight") == Approx(std::sqrt(6.0 / (5 * 384))).epsilon(0.01));
    CHECK(std_of(layer + name + ".bias") == Approx(1e-6).epsilon(0.2));
  }
  for (const auto* norm : {"ln_1", "ln_2"}) {
    CHECK(p[layer + norm + ".weight"].eq(1).all().item<bool>());
    CHECK(p[layer + norm + ".bias"].eq(0).all().item<bool>());
  }
  for (const auto* zero : {"class_token", "conv_proj.bias", "heads.head.weight", "heads.head.bias",
                           "encoder.ln.bias"}) {
    CHECK(p[zero].eq(0).all().item<bool>());
  }
}

TEST_CASE("stochastic depth skips samples' branches, keeps their mean, and is off in evaluation") {
  // Of two blocks the first is always kept.
  auto options = tiny();
  options.num_layers = 2;
  auto plain = noisy(options);
  options.stochastic_depth = 0.25;
  auto model = noisy(options);
  const int64_t batch = 4096;
  const auto image = random_images(1, 12);
  const torch::NoGradGuard no_grad;
  model->eval();
  CHECK(difference(model->forward(image), plain->forward(image)) <= 1e-12);
  model->train();
  const auto output = model->forward(image.expand({batch, -1, -1, -1}));
  const auto scaled = [&](const std::string& branch, double factor) {
    const auto p = plain->named_parameters();
    for (const auto* end : {".weight", ".bias"}) {
      p["encoder.layers.encoder_layer_1." + branch + end].mul_(factor);
    }
  };
  const double keep = 0.75;
  for (const bool attends : {false, true}) {
    for (const bool widens : {false, true}) {
      plain = noisy(options);
      plain->eval();
      scaled("self_attention.out_proj", attends ? 1 / keep : 0);
      scaled("mlp.3", widens ? 1 / keep : 0);
      const auto same = (output - plain->forward(image)).abs().amax(1).lt(1e-9);
      const double share = (attends ? keep : 1 - keep) * (widens ? keep : 1 - keep);
      INFO("attention " << attends << ", MLP " << widens);
      // Four standard deviations.
      CHECK(same.to(torch::kFloat64).mean().item<double>() ==
            Approx(share).margin(4 * std::sqrt(share * (1 - share) / batch)));
    }
  }
}

TEST_CASE("a ViT's dropout acts in training only") {
  auto options = tiny();
  options.dropout = 0.3;
  options.attention_dropout = 0.3;
  auto model = noisy(options);
  auto plain = noisy(tiny());
  const auto images = random_images(2, 12);
  CHECK(difference(model->forward(images), model->forward(images)) > 1e-3);
  model->eval();
  CHECK(torch::equal(model->forward(images), plain->forward(images)));
}

TEST_CASE("bfloat16 weights cast the images and follow the float64 model") {
  auto model = noisy(tiny());
  const auto images = random_images(4, 12);
  const auto expected = model->forward(images);
  model->to(torch::kBFloat16);
  const auto logits = model->forward(images.to(torch::kFloat32));
  CHECK(logits.scalar_type() == torch::kBFloat16);
  CHECK(difference(logits.to(torch::kFloat64), expected) <
        0.05 * expected.abs().max().item<double>());
}

TEST_CASE("wrong sizes of a ViT are refused with the setting's name") {
  const auto message_of = [](auto&& change) {
    auto options = tiny();
    change(options);
    return testing::message_of<std::invalid_argument>([&] { models::Vit{options}; });
  };
  CHECK_THAT(message_of([](auto& o) { o.patch_size = 5; }),
             Catch::Contains("image_size = 12 is not a multiple of patch_size = 5"));
  CHECK_THAT(message_of([](auto& o) { o.num_heads = 3; }),
             Catch::Contains("hidden_size = 16 is not a multiple of num_heads = 3"));
  CHECK_THAT(message_of([](auto& o) { o.num_layers = 0; }), Catch::Contains("num_layers = 0"));
  CHECK_THAT(message_of([](auto& o) { o.dropout = 1; }), Catch::Contains("dropout = 1"));
  CHECK_THAT(message_of([](auto& o) { o.stochastic_depth = -0.1; }),
             Catch::Contains("stochastic_depth = -0.1"));
  models::Vit model(tiny());
  const auto refused = testing::message_of<std::invalid_argument>([&] {
    model->forward(torch::zeros({2, 3, 12, 16}));
  });
  CHECK_THAT(refused, Catch::Contains("[2, 3, 12, 16]") && Catch::Contains("[batch, 3, 12, 12]"));
  for (const auto* name : {"vit_b", "vit_b_", "vit_b_0", "vit_b_16x", "vit_h_14", "resnet18"}) {
    CHECK_THROWS_WITH(models::vit_options(name), Catch::Contains("vit_ti_16, vit_s_16"));
  }
}
