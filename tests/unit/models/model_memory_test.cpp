// SPDX-License-Identifier: Apache-2.0
// Where models keep their weights: what moves them, and what must not.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "models/bert.hpp"
#include "models/encoder.hpp"
#include "models/gpt2.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"
#include "support/catch.hpp"

namespace {

models::Qwen2Options rotary_qwen2() {
  models::Qwen2Options o;
  o.vocab_size = 37;
  o.hidden_size = 16;
  o.intermediate_size = 24;
  o.num_layers = 2;
  o.num_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim = 4;
  o.max_positions = 5000;
  return o;
}

struct Named {
  std::string name;
  std::shared_ptr<models::LanguageModel> model;
};

/// One of each kind, in float32.
std::vector<Named> one_of_each() {
  torch::manual_seed(6);
  models::Gpt2Options gpt2;
  gpt2.vocab_size = 37;
  gpt2.max_positions = 16;
  gpt2.hidden_size = 16;
  gpt2.num_layers = 2;
  gpt2.num_heads = 4;
  models::BertOptions bert;
  bert.vocab_size = 37;
  bert.max_positions = 16;
  bert.hidden_size = 16;
  bert.num_layers = 2;
  bert.num_heads = 4;
  const auto seeded = [](auto model) {
    model->reset_parameters();
    return model;
  };
  const auto adapted = seeded(std::make_shared<models::Qwen2Impl>(rotary_qwen2()));
  models::add_lora(*adapted, {.rank = 2, .dropout = 0, .fp8_base = true});
  return {
      {"gpt2", seeded(std::make_shared<models::Gpt2Impl>(gpt2))},
      {"qwen2", seeded(std::make_shared<models::Qwen2Impl>(rotary_qwen2()))},
      {"qwen2 over an FP8 base", adapted},
      {"bert", seeded(std::make_shared<models::BertImpl>(bert))},
      {"encoder", std::make_shared<models::EncoderImpl>(models::EncoderOptions{.vocab_size = 37,
                                                                               .max_positions = 16,
                                                                               .hidden_size = 16,
                                                                               .num_layers = 2,
                                                                               .num_heads = 4})}};
}

torch::Tensor loss_of(models::LanguageModel& model) {
  const auto ids = torch::arange(14).view({2, 7});
  return model.forward({.input_ids = ids}, ids + 3).loss_sum;
}

std::vector<const void*> addresses(const models::LanguageModel& model) {
  std::vector<const void*> all;
  for (const auto& parameter : model.parameters()) {
    all.push_back(parameter.const_data_ptr());
  }
  return all;
}

bool are_adjacent(models::LanguageModel& model, const std::string& first,
                  const std::string& second) {
  const auto parameters = model.named_parameters();
  const auto& before = parameters[first];
  return static_cast<const char*>(before.const_data_ptr()) + before.nbytes() ==
         parameters[second].const_data_ptr();
}

/// Whether the products read the memory of the parameters.
void check_arranged(const Named& named) {
  CHECK(ddp::ops::padded_rows(named.model->head_weight()).size(0) == 128);
  if (named.name.starts_with("qwen2")) {
    const std::string layer = "model.layers.1.";
    const auto attention = layer + "self_attn.";
    CHECK(are_adjacent(*named.model, attention + "q_proj.weight", attention + "k_proj.weight"));
    CHECK(are_adjacent(*named.model, attention + "k_proj.bias", attention + "v_proj.bias"));
    CHECK(are_adjacent(*named.model, layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"));
  } else if (named.name == "bert") {
    const std::string self = "bert.encoder.layer.1.attention.self.";
    CHECK(are_adjacent(*named.model, self + "query.weight", self + "key.weight"));
    CHECK(are_adjacent(*named.model, self + "key.bias", self + "value.bias"));
  }
}

}  // namespace

TEST_CASE("weights are arranged by the constructor, to() and load(), and no forward moves them") {
  using Model = models::LanguageModel;
  const std::vector<std::pair<std::string, std::function<void(Model&)>>> moves = {
      {"constructed", [](Model&) {}},
      {"to(dtype)", [](Model& model) { model.to(torch::kDouble); }},
      {"to(device)",
       [](Model& model) {
         for (auto parameter : model.parameters()) {
           parameter.set_data(parameter.clone());
         }
         model.to(torch::Device(torch::kCPU));
       }},
      {"to(device, dtype)", [](Model& model) { model.to(torch::kCPU, torch::kDouble); }},
      {"load",
       [](Model& model) {
         torch::serialize::OutputArchive saved;
         model.save(saved);
         std::stringstream stream;
         saved.save_to(stream);
         torch::serialize::InputArchive archive;
         archive.load_from(stream);
         model.load(archive);
       }},
      {"arrange_weights", [](Model& model) {
         for (auto parameter : model.parameters()) {
           parameter.set_data(parameter.clone());
         }
         model.arrange_weights();
       }}};
  for (const auto& [move, make] : moves) {
    for (const auto& named : one_of_each()) {
      CAPTURE(named.name, move);
      named.model->eval();
      const auto before = loss_of(*named.model).item<float>();
      make(*named.model);
      check_arranged(named);
      const auto at = addresses(*named.model);
      CHECK(loss_of(*named.model).item<float>() == Approx(before).epsilon(1e-5));
      CHECK(addresses(*named.model) == at);
    }
  }
}

TEST_CASE("weights that the program moves stay where they are, and are used") {
  for (const auto& named : one_of_each()) {
    CAPTURE(named.name);
    named.model->eval();
    const torch::NoGradGuard no_grad;
    const auto before = loss_of(*named.model).item<float>();
    std::vector<torch::Tensor> shared;  // with other tensors of the program
    for (auto parameter : named.model->parameters()) {
      shared.push_back(parameter.clone());
      parameter.set_data(shared.back().view(parameter.sizes()));
    }
    CHECK(loss_of(*named.model).item<float>() == Approx(before).epsilon(1e-5));
    for (auto& memory : shared) {
      memory.mul_(1.5);
    }
    models::refresh_fp8_base();  // the parameters' own versions have not changed
    const auto after = loss_of(*named.model).item<float>();
    named.model->arrange_weights();
    models::refresh_fp8_base();
    CHECK(loss_of(*named.model).item<float>() == Approx(after).epsilon(1e-5));
    for (std::size_t i = 0; i < shared.size(); ++i) {
      CHECK(torch::equal(named.model->parameters()[i], shared[i]));
    }
  }
}

TEST_CASE("an FP8 copy follows new memory of each of its weights") {
  torch::manual_seed(7);
  const torch::NoGradGuard no_grad;
  for (const std::size_t replaced : {0, 1, 2}) {
    CAPTURE(replaced);
    std::vector<models::Linear> layers;
    for (int i = 0; i < 3; ++i) {
      layers.emplace_back(16, 32, /*with_bias=*/false);
      layers.back()->weight.normal_();
      layers.back()->add_lora({.rank = 4, .dropout = 0, .fp8_base = true});
    }
    const models::JoinedLinears joined(layers);
    const auto x = torch::randn({3, 16});
    const auto before = joined.forward(x).chunk(3, 1);
    auto& weight = layers[replaced]->weight;
    weight.set_data(weight * 2);
    const auto after = joined.forward(x).chunk(3, 1);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(torch::allclose(after[i], before[i] * (i == replaced ? 2 : 1), 1e-5, 1e-5));
    }
  }
}

TEST_CASE("a model trains after its first forward ran in inference mode") {
  for (const bool moved : {false, true}) {
    for (const auto& named : one_of_each()) {
      CAPTURE(named.name, moved);
      const auto arrange = [&] {
        for (auto parameter : named.model->parameters()) {
          parameter.set_data(parameter.clone());
        }
        const c10::InferenceMode inference;
        named.model->arrange_weights();
      };
      if (moved) {
        named.model->to(torch::kDouble);
        arrange();
      }
      {
        const c10::InferenceMode inference;
        loss_of(*named.model);
      }
      CHECK_NOTHROW(loss_of(*named.model).backward());
      for (const auto& item : named.model->named_parameters()) {
        CAPTURE(item.key());
        CHECK_FALSE(item.value().is_inference());
        CHECK(item.value().grad().defined() == item.value().requires_grad());
      }
    }
  }
}

TEST_CASE("a model made in inference mode evaluates there and outside") {
  auto made = [] {
    const c10::InferenceMode inference;
    return models::Qwen2(rotary_qwen2());
  }();
  {
    const c10::InferenceMode inference;
    made->reset_parameters();
    made->to(torch::kDouble);
    check_arranged({"qwen2", made.ptr()});
    loss_of(*made);
  }
  const torch::NoGradGuard no_grad;
  CHECK(loss_of(*made).isfinite().item<bool>());
  // LibTorch's own layers cannot be evaluated after a move outside inference mode, either.
  CHECK_NOTHROW(made->to(torch::kFloat));
}

TEST_CASE("rotary positions may lie anywhere below max_positions") {
  torch::manual_seed(8);
  models::Qwen2 model(rotary_qwen2(), torch::kDouble);
  model->reset_parameters();
  const torch::NoGradGuard no_grad;
  const auto ids = torch::randint(37, {2, 7}, torch::kLong);
  const auto plain = model->hidden_states({.input_ids = ids});
  for (const int64_t first : {3000, 4993}) {
    const auto positions = torch::arange(first, first + 7).unsqueeze(0).expand({2, 7});
    const auto shifted = model->hidden_states({.input_ids = ids, .position_ids = positions});
    // Attention depends on differences of positions; angles are rounded to float32.
    CHECK(torch::allclose(shifted, plain, 1e-3, 1e-3));
    const auto packed =
        model->hidden_states({.input_ids = ids.view({1, 14}),
                              .position_ids = positions.reshape({1, 14}),
                              .document_offsets = torch::tensor({0, 7, 14}, torch::kInt),
                              .max_document_length = 7});
    CHECK(torch::allclose(packed.view_as(plain), plain, 1e-3, 1e-3));
  }
}
