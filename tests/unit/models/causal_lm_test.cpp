// SPDX-License-Identifier: Apache-2.0
// Properties of every language model here with any weights; other tests prove equality with
// transformers.
#include "models/causal_lm.hpp"

#include <torch/torch.h>

#include "ddp/ops/language.hpp"
#include "models/gpt2.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"
#include "support/catch.hpp"

namespace {

models::Qwen2Options tiny_qwen2(bool tied = false) {
  models::Qwen2Options o;
  o.vocab_size = 37;
  o.hidden_size = 24;
  o.intermediate_size = 40;
  o.num_layers = 3;
  o.num_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim = 8;
  o.max_positions = 64;
  o.tie_word_embeddings = tied;
  o.initializer_range = 0.2;
  return o;
}

models::Gpt2Options tiny_gpt2() {
  models::Gpt2Options o;
  o.vocab_size = 37;
  o.max_positions = 64;
  o.hidden_size = 24;
  o.num_layers = 3;
  o.num_heads = 4;
  o.dropout = 0.2;
  o.initializer_range = 0.2;
  return o;
}

/// Each kind of model, with noise in every parameter, including biases and norms.
std::vector<std::pair<std::string, std::shared_ptr<models::CausalLm>>> all_models() {
  torch::manual_seed(3);
  const auto qwen2 = std::make_shared<models::Qwen2Impl>(tiny_qwen2());
  const auto tied = std::make_shared<models::Qwen2Impl>(tiny_qwen2(true));
  const auto gpt2 = std::make_shared<models::Gpt2Impl>(tiny_gpt2());
  qwen2->reset_parameters();
  tied->reset_parameters();
  gpt2->reset_parameters();
  std::vector<std::pair<std::string, std::shared_ptr<models::CausalLm>>> models = {
      {"qwen2", qwen2}, {"qwen2 tied", tied}, {"gpt2", gpt2}};
  const torch::NoGradGuard no_grad;
  for (auto& [name, model] : models) {
    for (auto& parameter : model->parameters()) {
      parameter.add_(torch::randn_like(parameter), 0.05);
    }
  }
  return models;
}

torch::Tensor random_ids(torch::IntArrayRef shape) {
  return torch::randint(37, shape, torch::kLong);
}

bool close(const torch::Tensor& a, const torch::Tensor& b, double tolerance = 1e-5) {
  return torch::allclose(a, b, tolerance, tolerance);
}

}  // namespace

TEST_CASE("forward is the cross entropy of the logits, at any chunk") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    model->eval();
    const auto ids = random_ids({2, 9});
    auto labels = random_ids({2, 9});
    labels[0].narrow(0, 0, 3).fill_(ddp::ops::kIgnoreIndex);
    const auto logits = model->logits(model->hidden_states({.input_ids = ids}));
    REQUIRE(logits.sizes() == torch::IntArrayRef({2, 9, 37}));
    const auto expected = torch::cross_entropy_loss(logits.reshape({-1, 37}), labels.view({-1}), {},
                                                    at::Reduction::Sum, -100);
    for (const int64_t chunk : {0, 4}) {
      model->computation().loss_chunk_tokens = chunk;
      const auto output = model->forward({.input_ids = ids}, labels);
      CHECK(output.loss_sum.item<float>() == Approx(expected.item<float>()).epsilon(1e-5));
      model->zero_grad();
      output.loss_sum.backward();
      const auto grads = model->named_parameters();
      std::vector<torch::Tensor> made;
      for (const auto& item : grads) {
        made.push_back(item.value().grad().clone());
      }
      const auto wanted = torch::autograd::grad({expected}, model->parameters(), {},
                                                /*retain_graph=*/true);
      for (std::size_t i = 0; i < made.size(); ++i) {
        CAPTURE(grads[i].key());
        CHECK(close(made[i], wanted[i], 1e-4));
      }
    }
  }
}

TEST_CASE("labels are smoothed and the z-loss is added in training alone") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    const auto ids = random_ids({2, 9}), labels = random_ids({2, 9});
    model->eval();
    const auto plain = model->forward({.input_ids = ids}, labels).loss_sum;
    model->computation().label_smoothing = 0.2;
    model->computation().z_loss = 0.01;
    CHECK(torch::equal(model->forward({.input_ids = ids}, labels).loss_sum, plain));
    model->train();
    torch::manual_seed(4);  // both forwards drop the same
    const auto logits = model->logits(model->hidden_states({.input_ids = ids})).reshape({-1, 37});
    const auto expected =
        torch::cross_entropy_loss(logits, labels.view({-1}), {}, at::Reduction::Sum, -100, 0.2) +
        0.01 * logits.logsumexp(1).square().sum();
    torch::manual_seed(4);
    CHECK(model->forward({.input_ids = ids}, labels).loss_sum.item<float>() ==
          Approx(expected.item<float>()).epsilon(1e-5));
  }
}

TEST_CASE("packed documents give what each gives alone") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    model->eval();
    const auto ids = random_ids({2, 8});
    models::TokenInput packed{
        .input_ids = ids,
        .position_ids =
            torch::tensor({0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 0}, torch::kLong)
                .view({2, 8}),
        .document_offsets = torch::tensor({0, 3, 8, 14, 15, 16}, torch::kInt),
        .max_document_length = 6};
    const auto together = model->hidden_states(packed).view({16, -1});
    const std::vector<int64_t> bounds = {0, 3, 8, 14, 15, 16};
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      const int64_t first = bounds[i], length = bounds[i + 1] - first;
      const auto alone =
          model->hidden_states({.input_ids = ids.view({1, 16}).narrow(1, first, length)});
      CHECK(close(together.narrow(0, first, length), alone[0]));
    }
  }
}

TEST_CASE("decoding with a cache equals the whole forward") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    model->eval();
    const torch::NoGradGuard no_grad;
    const auto ids = random_ids({2, 10});
    const auto whole = model->hidden_states({.input_ids = ids});
    auto cache = model->make_cache(2, 10);
    std::vector<torch::Tensor> parts = {
        model->hidden_states({.input_ids = ids.narrow(1, 0, 4)}, &cache)};
    for (int64_t i = 4; i < 10; ++i) {
      parts.push_back(model->hidden_states({.input_ids = ids.narrow(1, i, 1)}, &cache));
    }
    CHECK(cache.length == 10);
    CHECK(close(torch::cat(parts, 1), whole));
    CHECK_THROWS_WITH(model->hidden_states({.input_ids = ids.narrow(1, 0, 1)}, &cache),
                      Catch::Contains("the cache holds 10 of 10 tokens"));
  }
}

TEST_CASE("greedy decoding takes the largest logit until an end token") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    model->train();
    const std::vector<int64_t> prompt = {5, 9, 1};
    const auto generated = models::generate_greedy(*model, prompt, 6, {});
    CHECK(model->is_training());
    REQUIRE(generated.size() == 6);
    model->eval();
    auto so_far = prompt;
    for (const int64_t token : generated) {
      const auto ids = torch::tensor(so_far, torch::kLong).unsqueeze(0);
      const auto logits = model->logits(model->hidden_states({.input_ids = ids}));
      CHECK(logits[0][-1].argmax().item<int64_t>() == token);
      so_far.push_back(token);
    }
    const auto ended = models::generate_greedy(*model, prompt, 6, {generated[2]});
    CHECK(ended.back() == generated[2]);
    CHECK(ended.size() <= 3);
    // Limited by the number of positions.
    CHECK(models::generate_greedy(*model, prompt, 1000, {}).size() == 61);
    CHECK(models::generate_sampled(*model, prompt, 6, {}, {.temperature = 1e-6}) == generated);
    std::vector<int64_t> told;
    const models::SamplingOptions greedy{
        .temperature = 0, .seed = 3, .on_token = [&](int64_t token) { told.push_back(token); }};
    CHECK(models::generate_sampled(*model, prompt, 6, {}, greedy) == generated);
    CHECK(told == generated);
    const auto one = models::generate_sampled(*model, prompt, 20, {}, {.top_k = 5, .seed = 1});
    CHECK(one == models::generate_sampled(*model, prompt, 20, {}, {.top_k = 5, .seed = 1}));
    CHECK(one != models::generate_sampled(*model, prompt, 20, {}, {.top_k = 5, .seed = 2}));
  }
}

TEST_CASE("decoding leaves each module's mode as it was") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    model->train();
    const auto modes = [&model = model] {
      std::vector<bool> all;
      for (const auto& module : model->modules()) {
        all.push_back(module->is_training());
      }
      return all;
    };
    model->train();
    model->children().front()->eval();
    const auto before = modes();
    models::generate_greedy(*model, std::vector<int64_t>{5, 9}, 3, {});
    CHECK(modes() == before);
    models::generate_greedy(*model, std::vector<std::vector<int64_t>>{{5, 9}, {1}}, 3, {});
    CHECK(modes() == before);
    models::generate_sampled(*model, {5, 9}, 3, {}, {});
    CHECK(modes() == before);
  }
}

TEST_CASE("a prompt that leaves no position for an answer is refused") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    const std::vector<int64_t> full(64, 5);
    const auto message = Catch::Contains(
        "the prompt has 64 tokens, but the model has 64 positions, so that none is left");
    CHECK_THROWS_WITH(models::generate_greedy(*model, full, 3, {}), message);
    CHECK_THROWS_WITH(
        models::generate_greedy(*model, std::vector<std::vector<int64_t>>{{1}, full}, 3, {}),
        message);
    CHECK_THROWS_WITH(models::generate_sampled(*model, full, 3, {}, {}), message);
    const std::vector<int64_t> almost(63, 5);
    CHECK(models::generate_greedy(*model, almost, 3, {}).size() == 1);
  }
}

TEST_CASE("padded rows of the vocabulary are never chosen") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    const std::vector<int64_t> prompt = {5, 9, 1};
    const auto largest = [&] {
      const torch::NoGradGuard no_grad;
      const auto ids = torch::tensor(prompt, torch::kLong).unsqueeze(0);
      model->eval();
      return model->logits(model->hidden_states({.input_ids = ids}))[0][-1];
    };
    const auto best = largest().argmax().item<int64_t>();
    model->computation().num_tokens = best;  // ids 0 … best - 1 are tokens
    if (best == 0) {
      continue;
    }
    const auto expected = largest().narrow(0, 0, best).argmax().item<int64_t>();
    CHECK(models::generate_greedy(*model, prompt, 1, {}).at(0) == expected);
    CHECK(models::generate_greedy(*model, std::vector<std::vector<int64_t>>{prompt}, 1, {})
              .at(0)
              .at(0) == expected);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      for (const auto token :
           models::generate_sampled(*model, prompt, 20, {}, {.temperature = 10, .seed = seed})) {
        CHECK(token < best);
      }
    }
    model->computation().num_tokens = 0;
    CHECK(models::generate_greedy(*model, prompt, 1, {}).at(0) == best);
  }
}

TEST_CASE("several prompts are decoded at once as each alone") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    const std::vector<std::vector<int64_t>> prompts = {
        {5, 9, 1}, {7}, {3, 3, 8, 2, 20, 11}, {1, 2}};
    std::vector<std::vector<int64_t>> alone;
    for (const auto& prompt : prompts) {
      alone.push_back(models::generate_greedy(*model, prompt, 9, {}));
    }
    CHECK(models::generate_greedy(*model, prompts, 9, {}) == alone);
    const std::vector<int64_t> ends = {alone[0][2], alone[2][5]};
    const auto ended = models::generate_greedy(*model, prompts, 9, ends);
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      CHECK(ended[i] == models::generate_greedy(*model, prompts[i], 9, ends));
    }
    // Not all fit behind the longest prompt: they run one by one, up to the last position.
    CHECK(models::generate_greedy(*model, prompts, 60, {})[1].size() == 60);
  }
}

TEST_CASE("recomputed layers give the same bits") {
  for (auto& [name, model] : all_models()) {
    const auto ids = random_ids({2, 8}), labels = random_ids({2, 8});
    const auto gradients = [&](int64_t every) {
      torch::manual_seed(11);
      model->computation().checkpoint_every = every;
      model->zero_grad();
      model->train();
      model->forward({.input_ids = ids}, labels).loss_sum.backward();
      std::vector<torch::Tensor> all;
      for (const auto& parameter : model->parameters()) {
        all.push_back(parameter.grad().clone());
      }
      return all;
    };
    const auto plain = gradients(0);
    for (const int64_t every : {1, 2}) {
      CAPTURE(name, every);
      const auto recomputed = gradients(every);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        CHECK(torch::equal(plain[i], recomputed[i]));
      }
    }
  }
}

TEST_CASE("inputs that cannot be are refused") {
  for (auto& [name, model] : all_models()) {
    CAPTURE(name);
    CHECK_THROWS_WITH(model->hidden_states({.input_ids = random_ids({1, 65})}),
                      Catch::Contains("65 tokens is longer than the model's 64 positions"));
    CHECK_THROWS_WITH(model->hidden_states({.input_ids = torch::zeros({1, 3})}),
                      Catch::Contains("input_ids must be int64"));
  }
  auto odd = tiny_qwen2();
  odd.num_kv_heads = 3;
  CHECK_THROWS_WITH(models::Qwen2(odd), Catch::Contains("not a multiple of num_kv_heads = 3"));
  auto uneven = tiny_gpt2();
  uneven.num_heads = 5;
  CHECK_THROWS_WITH(models::Gpt2(uneven), Catch::Contains("not a multiple of num_heads = 5"));
}

TEST_CASE("LoRA starts as the base, trains two thin matrices a layer, and merges") {
  torch::manual_seed(5);
  models::Qwen2 model(tiny_qwen2());
  model->reset_parameters();
  model->eval();
  const auto ids = random_ids({2, 8}), labels = random_ids({2, 8});
  const auto base = model->hidden_states({.input_ids = ids}).detach();
  const auto summary = models::add_lora(*model, {.rank = 4, .alpha = 8, .dropout = 0.1});
  CHECK(summary.layers.size() == 21);
  // Per layer: q 24+32, k 24+16, v 24+16, o 32+24, gate 24+40, up 24+40, down 40+24; times rank.
  CHECK(summary.num_trainable == 3 * 4 * (56 + 40 + 40 + 56 + 64 + 64 + 64));
  CHECK(torch::equal(model->hidden_states({.input_ids = ids}), base));
  for (const auto& item : model->named_parameters()) {
    const bool is_adapter = item.key().find(".lora_") != std::string::npos;
    CHECK(item.value().requires_grad() == is_adapter);
  }
  model->train();
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model->forward({.input_ids = ids}, labels).loss_sum.backward();
    optimizer.step();
  }
  model->eval();
  const auto adapted = model->hidden_states({.input_ids = ids}).detach();
  CHECK_FALSE(close(adapted, base, 1e-3));
  models::merge_lora(*model);
  CHECK(close(model->hidden_states({.input_ids = ids}), adapted, 1e-4));
  for (const auto& item : model->named_parameters()) {
    CHECK(item.key().find(".lora_") == std::string::npos);
  }
  CHECK_THROWS_WITH(models::add_lora(*model, {.target_modules = {"q_proj", "c_attn"}}),
                    Catch::Contains("\"c_attn\" matches no linear layer"));
  CHECK_THROWS_WITH(models::add_lora(*model, {.rank = 0}), Catch::Contains("rank = 0"));
}

TEST_CASE("merge_lora rounds once, in the widest dtype that takes part") {
  torch::manual_seed(8);
  for (const auto base : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    for (const auto adapter : {torch::kDouble, torch::kFloat}) {
      CAPTURE(base, adapter);
      models::Linear linear(13, 7, false, torch::TensorOptions(base));
      const torch::NoGradGuard no_grad;
      linear->weight.normal_();
      linear->add_lora({.rank = 3, .alpha = 5, .dtype = adapter});
      linear->lora_b.normal_();
      const auto exact =
          linear->weight.to(torch::kDouble) +
          torch::mm(linear->lora_b.to(torch::kDouble), linear->lora_a.to(torch::kDouble)) *
              (5.0 / 3.0);
      linear->merge_lora();
      CHECK(linear->weight.scalar_type() == base);
      const bool is_exact = base == torch::kDouble;
      CHECK(torch::allclose(linear->weight.to(torch::kDouble), exact.to(base).to(torch::kDouble),
                            is_exact ? 1e-14 : 1e-6, is_exact ? 1e-14 : 1e-6));
    }
  }
}

TEST_CASE("LoRA with recomputed layers has the gradients of LoRA without") {
  torch::manual_seed(6);
  models::Qwen2 model(tiny_qwen2());
  model->reset_parameters();
  models::add_lora(*model, {.rank = 4, .alpha = 8, .dropout = 0.3});
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) {
      if (item.key().find("lora_B") != std::string::npos) {
        item.value().normal_(0, 0.1);
      }
    }
  }
  const auto ids = random_ids({2, 8}), labels = random_ids({2, 8});
  const auto gradients = [&](int64_t every) {
    torch::manual_seed(12);
    model->computation().checkpoint_every = every;
    model->zero_grad();
    model->forward({.input_ids = ids}, labels).loss_sum.backward();
    std::vector<torch::Tensor> all;
    for (const auto& parameter : model->parameters()) {
      if (parameter.requires_grad()) {
        all.push_back(parameter.grad().clone());
      }
    }
    return all;
  };
  const auto plain = gradients(0), recomputed = gradients(1);
  REQUIRE(plain.size() == 42);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CHECK(torch::equal(plain[i], recomputed[i]));
  }
}

TEST_CASE("Qwen2-7B with r = 64 on all seven linears trains 161.5 million parameters") {
  models::Qwen2 model(models::qwen2_7b(),
                      torch::TensorOptions(torch::kMeta).dtype(torch::kBFloat16));
  const auto summary = models::add_lora(*model, {.rank = 64, .alpha = 128});
  CHECK(summary.num_trainable == 161'480'704);
  CHECK(summary.num_frozen == 7'615'616'512);
  CHECK(summary.layers.size() == 7 * 28);
  // performance.md's count: 28.3 for the base, 0.97 for the adapters, 2.47 for attention.
  CHECK(model->flops_per_token(4096) / 1e9 == Approx(31.72).epsilon(0.005));
}

TEST_CASE("GPT-2 small has 124 million parameters under Hugging Face's names") {
  models::Gpt2 model(models::Gpt2Options{}, torch::TensorOptions(torch::kMeta));
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) {
    count += parameter.numel();
  }
  CHECK(count == 124'439'808);
  const auto names = model->named_parameters();
  CHECK(names["transformer.h.11.attn.c_attn.weight"].sizes() == torch::IntArrayRef({768, 2304}));
  CHECK(names["transformer.wte.weight"].sizes() == torch::IntArrayRef({50257, 768}));
  CHECK(model->flops_per_token(1024) / 1e9 == Approx(0.798).epsilon(0.01));
}

TEST_CASE("joined layers with different adapters, or none, equal the layers one by one") {
  torch::manual_seed(3);
  for (const int kind : {0, 1, 2, 3}) {
    CAPTURE(kind);
    std::vector<models::Linear> layers;
    for (int i = 0; i < 3; ++i) {
      layers.emplace_back(8, 4 + i, /*with_bias=*/kind != 3 || i > 0);
      for (auto& parameter : layers.back()->parameters()) {
        const torch::NoGradGuard no_grad;
        parameter.normal_();
      }
    }
    const models::JoinedLinears joined(layers);
    const auto x = torch::randn({2, 8});
    for (int i = 0; i < 3; ++i) {
      models::LoraOptions lora;
      lora.rank = 2;
      lora.dropout = 0;
      lora.dtype = kind == 2 && i == 1 ? torch::kDouble : torch::kFloat;
      if (kind == 1 ? i != 1 : kind == 2) {
        layers[static_cast<std::size_t>(i)]->add_lora(lora);
        torch::nn::init::normal_(layers[static_cast<std::size_t>(i)]->lora_b);
      }
    }
    std::vector<torch::Tensor> results;
    for (auto& layer : layers) {
      results.push_back(layer->forward(x));
    }
    const auto expected = torch::cat(results, -1);
    CHECK(torch::allclose(joined.forward(x), expected, 1e-5, 1e-5));
    CHECK(layers[1]->weight.data_ptr<float>() == layers[0]->weight.data_ptr<float>() + 4 * 8);
  }
}
