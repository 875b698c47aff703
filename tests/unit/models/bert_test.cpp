// SPDX-License-Identifier: Apache-2.0
// Dropout, initial weights and operation counts of BERT. unit_pretrained_models compares its
// results with transformers.
#include "models/bert.hpp"

#include <torch/torch.h>

#include <string>

#include "support/catch.hpp"

namespace {

models::BertOptions small_bert() {
  models::BertOptions o;
  o.vocab_size = 37;
  o.max_positions = 16;
  o.hidden_size = 24;
  o.num_layers = 2;
  o.num_heads = 4;
  o.hidden_dropout = 0;
  o.attention_dropout = 0;
  o.initializer_range = 0.2;
  return o;
}

models::Bert seeded_bert(const models::BertOptions& options) {
  torch::manual_seed(3);
  models::Bert model(options);
  model->reset_parameters();
  return model;
}

bool is_norm(const std::string& name) {
  return name.find("LayerNorm.") != std::string::npos;
}

}  // namespace

TEST_CASE("a BERT's dropout acts in training only") {
  const auto ids = torch::randint(1, 37, {2, 16}, torch::kLong);
  const auto plain = seeded_bert(small_bert())->hidden_states({.input_ids = ids});
  for (const bool of_attention : {false, true}) {
    CAPTURE(of_attention);
    auto options = small_bert();
    (of_attention ? options.attention_dropout : options.hidden_dropout) = 0.3;
    auto model = seeded_bert(options);
    const auto run = [&] { return model->hidden_states({.input_ids = ids}); };
    CHECK((run() - run()).abs().max().item<double>() > 1e-2);
    model->eval();
    CHECK(torch::equal(run(), plain));
  }
}

TEST_CASE("a BERT's initial weights are normal, biases 0, norms 1 and the padding's embedding 0") {
  auto options = small_bert();
  options.vocab_size = 500;
  options.max_positions = 100;
  options.hidden_size = 64;
  options.initializer_range = 0.02;
  for (const int64_t padding : {0, 7, -1}) {
    CAPTURE(padding);
    options.pad_token_id = padding;
    models::Bert model(options);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) {
      parameter.fill_(5);
    }
    torch::manual_seed(11);
    model->reset_parameters();
    for (const auto& item : model->named_parameters()) {
      INFO(item.key());
      const auto& value = item.value();
      if (value.dim() == 1) {
        const bool is_scale = is_norm(item.key()) && item.key().ends_with(".weight");
        CHECK(value.eq(is_scale ? 1 : 0).all().item<bool>());
        continue;
      }
      // At least 128 values: five standard deviations of mean and spread are below 0.44 and 0.32 of
      // the standard deviation; of 4,096 values, below 0.08 and 0.06.
      const bool few = value.numel() < 4096;
      CHECK(value.mean().item<double>() == Approx(0).margin(0.02 * (few ? 0.44 : 0.08)));
      CHECK(value.std().item<double>() == Approx(0.02).epsilon(few ? 0.32 : 0.06));
    }
    const auto table = model->head_weight();
    CHECK(table.eq(0).all(1).sum().item<int64_t>() == (padding < 0 ? 0 : 1));
    if (padding >= 0) {
      CHECK(table[padding].eq(0).all().item<bool>());
    }
  }
}

TEST_CASE("a BERT's operations count whole attention, and the head by its share") {
  const auto options = small_bert();
  auto model = seeded_bert(options);
  const double width = 24, layers = 2, vocabulary = 37, tokens = 16;
  // Per layer: query, key, value and output, then two products with 4 * width.
  const double body = layers * 12 * width * width;
  const double head = width * width + vocabulary * width;
  // Q Kᵀ and P V over all tokens, with twice the work in the backward.
  const double attention = 3 * 2 * 2 * tokens * width * layers;
  CHECK(model->flops_per_token(16) == 6 * (body + head) + attention);
  model->computation().head_share = 0.25;
  CHECK(model->flops_per_token(16) == 6 * (body + 0.25 * head) + attention);
  for (auto& parameter : model->parameters()) {
    parameter.requires_grad_(false);
  }
  CHECK(model->flops_per_token(16) == 4 * (body + 0.25 * head) + attention);
}
