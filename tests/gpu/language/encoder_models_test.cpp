// SPDX-License-Identifier: Apache-2.0
// BERT, Vision Transformers and the reference encoder on a GPU compared with the same weights on
// the CPU in float32.
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "gpu/vision/model_pair.hpp"
#include "models/bert.hpp"
#include "models/encoder.hpp"
#include "models/vit.hpp"
#include "support/catch.hpp"

using ddp::ops::AttentionBackend;
using lm_test::check_gradients;
using lm_test::check_recomputed;
using lm_test::copy_weights;
using lm_test::fill_with_noise;
using lm_test::relative_error;

namespace {

/// In training, models run the kernels with dropout, but drop next to nothing: GPUs round this up
/// to 2^-16.
constexpr double kTinyRate = 1e-6;

constexpr int64_t kMaskedVocab = 509;  // odd: padded to 512 internally

const torch::TensorOptions kOnGpu = torch::TensorOptions().device(torch::kCUDA);

template <typename Model, typename Options>
std::pair<Model, Model> make_twins(const Options& options, bool is_training,
                                   torch::Dtype dtype = torch::kBFloat16) {
  Model on_cpu(options, torch::kFloat);
  Model on_gpu(options, kOnGpu.dtype(dtype));
  fill_with_noise(*on_cpu);
  copy_weights(*on_cpu, *on_gpu);
  on_cpu->train(is_training);
  on_gpu->train(is_training);
  return {on_cpu, on_gpu};
}

models::BertOptions small_bert() {
  return {.vocab_size = kMaskedVocab,
          .max_positions = 256,
          .hidden_size = 128,
          .num_layers = 3,
          .num_heads = 4,
          .hidden_dropout = kTinyRate,
          .attention_dropout = 0};
}

models::VitOptions small_vit() {
  return {.image_size = 32,
          .patch_size = 4,
          .num_classes = 10,
          .hidden_size = 128,
          .num_layers = 3,
          .num_heads = 4,
          .dropout = kTinyRate,
          .stochastic_depth = kTinyRate};
}

struct MaskedBatch {
  models::TokenInput input;
  torch::Tensor labels;
};

/// Three rows of 100 tokens. `packed`: of five documents that do not attend to each other.
MaskedBatch masked_batch(bool packed) {
  torch::manual_seed(22);
  MaskedBatch batch{{.input_ids = torch::randint(1, kMaskedVocab, {3, 100}, torch::kLong),
                     .target_positions = torch::arange(2, 300, 7, torch::kLong)},
                    torch::randint(kMaskedVocab, {43}, torch::kLong)};
  batch.labels[5] = ddp::ops::kIgnoreIndex;
  if (packed) {
    const std::vector<int32_t> bounds = {0, 1, 60, 64, 150, 300};
    std::vector<torch::Tensor> positions;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      positions.push_back(torch::arange(bounds[i + 1] - bounds[i], torch::kLong));
    }
    batch.input.position_ids = torch::cat(positions).view({3, 100});
    batch.input.document_offsets = torch::tensor(bounds, torch::kInt);
    batch.input.max_document_length = 150;
  }
  return batch;
}

MaskedBatch to_gpu(MaskedBatch batch) {
  for (auto* tensor : {&batch.input.input_ids, &batch.input.position_ids, &batch.labels,
                       &batch.input.document_offsets, &batch.input.target_positions}) {
    if (tensor->defined()) {
      *tensor = tensor->to(torch::kCUDA);
    }
  }
  return batch;
}

void check_bert(std::pair<models::Bert, models::Bert>& pair, const MaskedBatch& batch) {
  auto& [on_cpu, on_gpu] = pair;
  on_cpu->zero_grad();
  on_gpu->zero_grad();
  const auto there = to_gpu(batch);
  const auto expected = on_cpu->forward(batch.input, batch.labels);
  const auto output = on_gpu->forward(there.input, there.labels);
  CHECK(relative_error(output.loss_sum, expected.loss_sum) < 2e-3);
  expected.loss_sum.backward();
  output.loss_sum.backward();
  check_gradients(*on_gpu, *on_cpu);
}

}  // namespace

TEST_CASE("BERT in bfloat16 on a GPU gives the CPU's loss and gradients, on every backend") {
  const bool is_training = GENERATE(false, true), packed = GENERATE(false, true);
  auto pair = make_twins<models::Bert>(small_bert(), is_training);
  const auto batch = masked_batch(packed);
  for (const auto backend : {AttentionBackend::Auto, AttentionBackend::Cudnn,
                             AttentionBackend::Flash, AttentionBackend::Math}) {
    if (packed && backend == AttentionBackend::Cudnn) {
      continue;  // is refused
    }
    CAPTURE(is_training, packed, static_cast<int>(backend));
    pair.second->computation().attention = backend;
    check_bert(pair, batch);
  }
  pair.second->computation() = {.loss_chunk_tokens = 20, .checkpoint_every = 2};
  check_bert(pair, batch);
}

TEST_CASE("BERT's recomputed layers drop what they dropped: gradients equal bit for bit") {
  auto options = small_bert();
  options.hidden_dropout = options.attention_dropout = 0.1;
  auto model = make_twins<models::Bert>(options, /*is_training=*/true).second;
  model->computation().attention = AttentionBackend::Math;  // the kernels sum dQ in varying order
  auto batch = to_gpu(masked_batch(/*packed=*/false));
  batch.input.target_positions = torch::Tensor();  // its gradient is summed in varying order
  batch.labels = batch.input.input_ids.roll(1);
  check_recomputed(*model, batch);
}

TEST_CASE("the reference encoder on a GPU gives the CPU's loss and gradients, exact in float32") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  const bool is_exact = dtype == torch::kFloat;
  CAPTURE(is_exact);
  auto [on_cpu, on_gpu] =
      make_twins<models::Encoder>(models::EncoderOptions{.vocab_size = kMaskedVocab,
                                                         .max_positions = 100,
                                                         .hidden_size = 128,
                                                         .num_layers = 3,
                                                         .num_heads = 4},
                                  /*is_training=*/true, dtype);
  torch::manual_seed(25);
  const auto ids = torch::randint(kMaskedVocab, {3, 100}, torch::kLong);
  const auto labels = torch::randint(kMaskedVocab, {3, 100}, torch::kLong);
  const auto expected = on_cpu->forward({.input_ids = ids}, labels);
  const auto output = on_gpu->forward({.input_ids = ids.to(torch::kCUDA)}, labels.to(torch::kCUDA));
  CHECK(relative_error(output.loss_sum, expected.loss_sum) < (is_exact ? 1e-6 : 2e-3));
  expected.loss_sum.backward();
  output.loss_sum.backward();
  if (is_exact) {
    check_gradients(*on_gpu, *on_cpu, 1e-5, 1e-6);
  } else {
    check_gradients(*on_gpu, *on_cpu);
  }
}

TEST_CASE("a ViT in bfloat16 on a GPU gives the CPU's logits and gradients") {
  const bool is_training = GENERATE(false, true);
  const bool has_autocast = GENERATE(false, true);  // over float32 parameters
  CAPTURE(is_training, has_autocast);
  auto [on_cpu, on_gpu] = make_twins<models::Vit>(small_vit(), is_training,
                                                  has_autocast ? torch::kFloat : torch::kBFloat16);
  torch::manual_seed(24);
  const auto images = torch::randn({6, 3, 32, 32}).to(torch::kBFloat16).to(torch::kFloat);
  const auto target = torch::randint(10, {6}, torch::kLong);
  const auto expected = on_cpu->forward(images);
  torch::Tensor logits;
  {
    const ddp::Autocast autocast(has_autocast ? ddp::AmpDtype::Bf16 : ddp::AmpDtype::Off);
    logits = on_gpu->forward(images.to(torch::kCUDA));
  }
  CHECK(logits.scalar_type() == torch::kBFloat16);
  CHECK(relative_error(logits, expected) < 0.02);
  torch::cross_entropy_loss(expected, target).backward();
  torch::cross_entropy_loss(logits.to(torch::kFloat), target.to(torch::kCUDA)).backward();
  check_gradients(*on_gpu, *on_cpu);
}
