// SPDX-License-Identifier: Apache-2.0
// Language models on a GPU in bfloat16 compared with the same weights on the CPU in float32.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "gpu/vision/model_pair.hpp"
#include "models/gpt2.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"
#include "support/catch.hpp"

using ddp::ops::AttentionBackend;
using lm_test::check_gradients;
using lm_test::check_recomputed;
using lm_test::copy_weights;
using lm_test::fill_with_noise;
using lm_test::relative_error;

namespace {

using ModelPtr = std::shared_ptr<models::CausalLm>;

constexpr int64_t kVocab = 509;  // odd: padded to 512 internally

ModelPtr make_model(const std::string& kind, const torch::TensorOptions& memory) {
  if (kind == "gpt2") {
    models::Gpt2Options o;
    o.vocab_size = kVocab;
    o.max_positions = 256;
    o.hidden_size = 128;
    o.num_layers = 3;
    o.num_heads = 4;
    o.dropout = 0.1;
    return std::make_shared<models::Gpt2Impl>(o, memory);
  }
  models::Qwen2Options o;
  o.vocab_size = kVocab;
  o.hidden_size = 128;
  o.intermediate_size = 320;
  o.num_layers = 3;
  o.num_heads = 8;
  o.num_kv_heads = 2;
  o.head_dim = 32;
  o.max_positions = 256;
  o.tie_word_embeddings = kind == "qwen2 tied";
  auto model = std::make_shared<models::Qwen2Impl>(o, memory);
  if (kind == "qwen2 lora") {
    torch::manual_seed(20);
    models::add_lora(*model, {.rank = 8, .alpha = 16, .dropout = 0.1});
  }
  return model;
}
const std::vector<std::string> kKinds = {"qwen2", "qwen2 tied", "qwen2 lora", "gpt2"};

/// The model on the CPU in float32 and its copy on the GPU in `dtype`.
std::pair<ModelPtr, ModelPtr> make_pair(const std::string& kind, torch::Dtype dtype) {
  auto on_cpu = make_model(kind, torch::kFloat);
  auto on_gpu = make_model(kind, torch::TensorOptions().device(torch::kCUDA).dtype(dtype));
  fill_with_noise(*on_cpu);
  copy_weights(*on_cpu, *on_gpu);
  on_cpu->eval();
  on_gpu->eval();
  return {on_cpu, on_gpu};
}

struct Batch {
  models::TokenInput input;
  torch::Tensor labels;
};
Batch random_batch(int64_t batch, int64_t seq) {
  torch::manual_seed(22);
  Batch result{{.input_ids = torch::randint(kVocab, {batch, seq}, torch::kLong)},
               torch::randint(kVocab, {batch, seq}, torch::kLong)};
  result.labels.slice(1, 0, seq, 5).fill_(ddp::ops::kIgnoreIndex);
  return result;
}
Batch to_gpu(const Batch& batch) {
  const auto move = [](const torch::Tensor& t) { return t.defined() ? t.to(torch::kCUDA) : t; };
  return {{move(batch.input.input_ids), move(batch.input.position_ids),
           move(batch.input.document_offsets), batch.input.max_document_length},
          move(batch.labels)};
}

void check_pair(const std::pair<ModelPtr, ModelPtr>& pair, const Batch& batch) {
  const auto& [on_cpu, on_gpu] = pair;
  on_cpu->zero_grad();
  on_gpu->zero_grad();
  const auto expected = on_cpu->forward(batch.input, batch.labels);
  const auto there = to_gpu(batch);
  const auto output = on_gpu->forward(there.input, there.labels);
  CHECK(relative_error(output.loss_sum, expected.loss_sum) < 2e-3);
  expected.loss_sum.backward();
  output.loss_sum.backward();
  check_gradients(*on_gpu, *on_cpu);
}

}  // namespace

TEST_CASE("models in bfloat16 on a GPU give the CPU's loss and gradients, on every backend") {
  const auto batch = random_batch(3, 100);
  for (const auto& kind : kKinds) {
    const auto pair = make_pair(kind, torch::kBFloat16);
    for (const auto backend : {AttentionBackend::Auto, AttentionBackend::Cudnn,
                               AttentionBackend::Flash, AttentionBackend::Math}) {
      CAPTURE(kind, static_cast<int>(backend));
      pair.second->computation().attention = backend;
      check_pair(pair, batch);
    }
    CAPTURE(kind);
    const torch::NoGradGuard no_grad;
    const auto there = to_gpu(batch);
    const auto logits = pair.second->logits(pair.second->hidden_states(there.input));
    REQUIRE(logits.size(-1) == kVocab);
    CHECK(relative_error(logits, pair.first->logits(pair.first->hidden_states(batch.input))) <
          0.02);
  }
}

TEST_CASE("chunks and recomputation change nothing on a GPU either") {
  const auto batch = random_batch(2, 128);
  for (const auto& kind : kKinds) {
    CAPTURE(kind);
    const auto pair = make_pair(kind, torch::kBFloat16);
    pair.second->computation().loss_chunk_tokens = 100;
    pair.second->computation().checkpoint_every = 2;
    check_pair(pair, batch);
  }
}

TEST_CASE("float32 parameters under bfloat16 autocast get float32 gradients") {
  const auto batch = random_batch(2, 64);
  for (const auto& kind : kKinds) {
    CAPTURE(kind);
    const auto pair = make_pair(kind, torch::kFloat);
    const auto there = to_gpu(batch);
    models::LmOutput output;
    {
      const ddp::Autocast autocast(ddp::AmpDtype::Bf16);
      output = pair.second->forward(there.input, there.labels);
    }
    output.loss_sum.backward();
    const auto expected = pair.first->forward(batch.input, batch.labels);
    expected.loss_sum.backward();
    CHECK(relative_error(output.loss_sum, expected.loss_sum) < 2e-3);
    check_gradients(*pair.second, *pair.first);
    for (const auto& parameter : pair.second->parameters()) {
      CHECK((!parameter.grad().defined() || parameter.grad().scalar_type() == torch::kFloat));
    }
  }
}

TEST_CASE("packed documents on a GPU give the loss of each document alone") {
  const std::vector<int32_t> bounds = {0, 1, 60, 64, 150, 200};
  auto batch = random_batch(2, 100);
  std::vector<torch::Tensor> positions;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    positions.push_back(torch::arange(bounds[i + 1] - bounds[i], torch::kLong));
  }
  batch.input.position_ids = torch::cat(positions).view({2, 100});
  batch.input.document_offsets = torch::tensor(bounds, torch::kInt);
  batch.input.max_document_length = 86;
  const auto there = to_gpu(batch);
  for (const auto& kind : kKinds) {
    CAPTURE(kind);
    const auto pair = make_pair(kind, torch::kBFloat16);
    const auto packed = pair.second->forward(there.input, there.labels);
    auto alone = torch::zeros({}, torch::kFloat);
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      const auto part = [&](const torch::Tensor& all) {
        return all.view({1, 200}).slice(1, bounds[i], bounds[i + 1]);
      };
      alone = alone +
              pair.first->forward({.input_ids = part(batch.input.input_ids)}, part(batch.labels))
                  .loss_sum;
    }
    CHECK(relative_error(packed.loss_sum, alone) < 2e-3);
    alone.backward();
    packed.loss_sum.backward();
    check_gradients(*pair.second, *pair.first);
  }
}

TEST_CASE("recomputed layers on a GPU drop what they dropped: gradients equal bit for bit") {
  const auto batch = to_gpu(random_batch(2, 64));
  for (const auto& kind : kKinds) {
    CAPTURE(kind);
    auto model = make_pair(kind, torch::kBFloat16).second;
    model->computation().attention = AttentionBackend::Math;  // the kernels sum dQ in varying order
    model->train();
    check_recomputed(*model, batch);
  }
}

TEST_CASE("decoding with a cache on a GPU equals the whole forward, on every backend") {
  const torch::NoGradGuard no_grad;
  const auto ids = to_gpu(random_batch(2, 70)).input.input_ids;
  for (const auto& kind : kKinds) {
    auto model = make_pair(kind, torch::kBFloat16).second;
    for (const auto backend : {AttentionBackend::Auto, AttentionBackend::Cudnn,
                               AttentionBackend::Flash, AttentionBackend::Math}) {
      CAPTURE(kind, static_cast<int>(backend));
      model->computation().attention = backend;
      const auto whole = model->hidden_states({.input_ids = ids});
      auto cache = model->make_cache(2, 70);
      std::vector<torch::Tensor> parts = {
          model->hidden_states({.input_ids = ids.narrow(1, 0, 40)}, &cache)};
      for (int64_t i = 40; i < 70; ++i) {
        parts.push_back(model->hidden_states({.input_ids = ids.narrow(1, i, 1)}, &cache));
      }
      CHECK(cache.length == 70);
      CHECK(relative_error(torch::cat(parts, 1), whole) < 0.02);
    }
  }
}

TEST_CASE("greedy text on a GPU in float32 is the CPU's") {
  const std::vector<int64_t> prompt = {5, 17, 300, 42};
  for (const auto& kind : kKinds) {
    CAPTURE(kind);
    const auto pair = make_pair(kind, torch::kFloat);
    const auto expected = models::generate_greedy(*pair.first, prompt, 24, {});
    CHECK(expected.size() == 24);
    CHECK(models::generate_greedy(*pair.second, prompt, 24, {}) == expected);
    const std::vector<std::vector<int64_t>> prompts = {{7}, prompt, {9, 1}};
    CHECK(models::generate_greedy(*pair.second, prompts, 24, {}) ==
          models::generate_greedy(*pair.first, prompts, 24, {}));
  }
}
