// SPDX-License-Identifier: Apache-2.0
// The reference encoder compared with a plain statement of it in LibTorch's ops.
#include "models/encoder.hpp"

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>

#include "support/catch.hpp"

namespace {

models::EncoderOptions tiny_encoder() {
  return {.vocab_size = 13, .max_positions = 8, .hidden_size = 16, .num_layers = 2, .num_heads = 2};
}

/// In float64 with noise in every parameter.
models::Encoder noisy_encoder() {
  torch::manual_seed(5);
  models::Encoder model(tiny_encoder(), torch::kFloat64);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    parameter.add_(torch::randn_like(parameter), 0.2);
  }
  return model;
}

/// benchmarks/pytorch_encoder.py: pre-norm layers, no mask, exact GELU, a head of its own, and the
/// sum of the loss over all positions.
torch::Tensor plain_encoder_loss(models::EncoderImpl& model, const torch::Tensor& ids,
                                 const torch::Tensor& labels) {
  const auto p = model.named_parameters();
  const auto& o = model.options();
  const auto norm = [&](const torch::Tensor& x, const std::string& name) {
    return torch::layer_norm(x, {o.hidden_size}, p[name + ".weight"], p[name + ".bias"], 1e-5);
  };
  const auto linear = [&](const torch::Tensor& x, const std::string& name) {
    return torch::linear(x, p[name + ".weight"], p[name + ".bias"]);
  };
  auto x =
      torch::embedding(p["words.weight"], ids) + p["positions.weight"].slice(0, 0, ids.size(1));
  for (int64_t i = 0; i < o.num_layers; ++i) {
    const auto layer = "layers." + std::to_string(i);
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
  const auto logits = torch::linear(norm(x, "norm"), p["head.weight"]);
  return torch::nn::functional::cross_entropy(
      logits.flatten(0, 1), labels.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

}  // namespace

TEST_CASE("the encoder's loss and gradients equal the plain statement's") {
  auto model = noisy_encoder();
  const auto ids = torch::randint(13, {3, 6}, torch::kLong);
  const auto labels = torch::randint(13, {3, 6}, torch::kLong);
  const auto loss = model->forward({.input_ids = ids}, labels).loss_sum;
  loss.backward();
  std::map<std::string, torch::Tensor> grads;
  for (const auto& item : model->named_parameters()) {
    grads[item.key()] = item.value().grad().clone();
  }
  model->zero_grad();
  const auto expected = plain_encoder_loss(*model, ids, labels);
  expected.backward();
  // The loss is computed in float32.
  CHECK(loss.item<double>() == Approx(expected.item<double>()).epsilon(1e-6));
  for (const auto& item : model->named_parameters()) {
    INFO(item.key());
    const auto& theirs = item.value().grad();
    const double largest = theirs.abs().max().item<double>();
    CHECK(largest > 1e-3);
    CHECK((grads[item.key()] - theirs).abs().max().item<double>() <= 1e-5 * (1 + largest));
  }
}

TEST_CASE("the encoder of cluster_check has the sizes of its documentation") {
  const models::Encoder model(models::EncoderOptions{}, torch::device(torch::kMeta));
  int64_t sum = 0;
  for (const auto& parameter : model->parameters()) {
    sum += parameter.numel();
  }
  // A layer of width d: 3 d d + 3 d, d d + d, 8 d d + 5 d, two norms of 2 d.
  const int64_t d = 768, layer = 12 * d * d + 13 * d;
  CHECK(sum == 2 * 50257 * d + 512 * d + 12 * layer + 2 * d);
}

TEST_CASE("the encoder refuses what it would not use") {
  auto model = noisy_encoder();
  const auto ids = torch::randint(13, {1, 6}, torch::kLong);
  CHECK_THROWS_WITH(
      model->forward({.input_ids = ids, .token_type_ids = torch::zeros_like(ids)}, ids),
      Catch::Contains("input_ids and position_ids only"));
  auto odd = tiny_encoder();
  odd.num_heads = 3;
  CHECK_THROWS_WITH(models::Encoder(odd), Catch::Contains("hidden_size = 16"));
}
