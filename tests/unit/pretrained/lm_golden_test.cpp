// SPDX-License-Identifier: Apache-2.0
// Tiny models and adapters saved by transformers and PEFT give these libraries' results
// (tests/golden/make_lm_golden.py), in float32.
#include <cstdio>

#include "models/bert.hpp"
#include "models/lora.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "models/pretrained/peft_adapter.hpp"
#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

// Both sides sum in their own order; the observed difference is 1e-6.
constexpr double kTolerance = 1e-4;

std::string golden(const std::string& name) {
  return std::string(DDP_GOLDEN_DIR) + "/lm/" + name;
}

// Largest difference divided by the largest value.
double error_of(const at::Tensor& ours, const at::Tensor& theirs) {
  REQUIRE(ours.sizes() == theirs.sizes());
  const auto difference = (ours.detach() - theirs).abs().max().item<double>();
  return difference / theirs.abs().max().item<double>();
}

struct Case {
  std::shared_ptr<models::CausalLm> model;
  ddp::TensorMap golden;
};

Case load_case(const std::string& name) {
  auto model = models::make_causal_lm(models::read_hf_config(golden(name)), at::kFloat);
  const auto load = models::load_pretrained(*model, golden(name));
  CHECK(load.differences.empty());
  model->eval();
  return {model, ddp::load_safetensors(golden(name) + "/case.safetensors").tensors};
}

// transformers shifts labels itself; libddp expects shifted labels.
at::Tensor shifted(const at::Tensor& labels) {
  const auto ignored = torch::full({labels.size(0), 1}, -100, labels.options());
  return torch::cat({labels.narrow(1, 1, labels.size(1) - 1), ignored}, 1);
}

// Compares logits and loss with golden[prefix + "logits"] and golden[prefix + "loss"]; returns the
// loss.
at::Tensor check_forward(const Case& c, const std::string& name, const std::string& prefix) {
  const models::TokenInput input{.input_ids = c.golden.at("input_ids")};
  const auto labels = shifted(c.golden.at("labels"));
  const auto logits = c.model->logits(c.model->hidden_states(input));
  const auto loss =
      c.model->forward(input, labels).loss_sum / (labels != -100).sum().to(at::kFloat);
  const double logits_error = error_of(logits, c.golden.at(prefix + "logits"));
  const double loss_error = error_of(loss, c.golden.at(prefix + "loss"));
  std::printf("%s %s: logits differ by %.1e, loss %.1e\n", name.c_str(), prefix.c_str(),
              logits_error, loss_error);
  CHECK(logits_error <= kTolerance);
  CHECK(loss_error <= kTolerance);
  return loss;
}

void check_gradients(const ddp::TensorMap& golden_tensors, const torch::nn::Module& model,
                     const std::string& name, const std::string& prefix) {
  double largest = 0;
  std::size_t count = 0;
  for (const auto& item : model.named_parameters()) {
    if (!item.value().requires_grad()) {
      CHECK_FALSE(item.value().grad().defined());
      continue;
    }
    INFO(item.key());
    const auto& theirs = golden_tensors.at(prefix + item.key());
    ++count;
    if (item.key().ends_with(".key.bias")) {
      // Softmax ignores what a key's bias adds to all scores of a query: only rounding is left.
      CHECK(item.value().grad().abs().max().item<double>() < 1e-6);
      continue;
    }
    const double error = error_of(item.value().grad(), theirs);
    CHECK(error <= kTolerance);
    largest = std::max(largest, error);
  }
  std::size_t expected = 0;
  for (const auto& [key, tensor] : golden_tensors) {
    expected += key.starts_with("grad.") ? 1 : 0;
  }
  CHECK(count == expected);
  std::printf("%s: %zu gradients differ by at most %.1e\n", name.c_str(), count, largest);
}

}  // namespace

TEST_CASE("Qwen2 and Llama of transformers, and PEFT's adapters, compute the same here") {
  for (const std::string name : {"qwen2", "llama"}) {
    auto c = load_case(name);
    check_forward(c, name, "");
    const auto summary = models::add_adapter(*c.model, golden(name) + "/adapter");
    CHECK(summary.layers.size() == (name == "qwen2" ? 14 : 4));
    const auto loss = check_forward(c, name, "adapter.");
    loss.backward();
    check_gradients(c.golden, *c.model, name, "grad.base_model.model.");
    models::merge_lora(*c.model);
    check_forward(c, name + " merged", "adapter.");
  }
}

TEST_CASE("GPT-2 of transformers computes the same here") {
  auto c = load_case("gpt2");
  check_forward(c, "gpt2", "").backward();
  check_gradients(c.golden, *c.model, "gpt2", "grad.");
}

TEST_CASE("BERT of transformers computes the same here") {
  const auto config = models::read_hf_config(golden("bert"));
  const auto tensors = ddp::load_safetensors(golden("bert") + "/case.safetensors").tensors;
  const models::TokenInput input{.input_ids = tensors.at("input_ids"),
                                 .token_type_ids = tensors.at("token_type_ids")};
  const auto& labels = tensors.at("labels");
  const auto positions = (labels.flatten() != -100).nonzero().flatten();
  for (const bool recomputes : {false, true}) {
    for (const bool gathers : {false, true}) {
      CAPTURE(recomputes, gathers);
      const auto model = std::dynamic_pointer_cast<models::BertImpl>(
          models::make_language_model(config, at::kFloat));
      CHECK(models::load_pretrained(*model, golden("bert")).differences.empty());
      model->computation().checkpoint_every = recomputes ? 1 : 0;
      model->computation().loss_chunk_tokens = recomputes ? 5 : 0;
      const auto logits = model->logits(model->hidden_states(input));
      CHECK(error_of(logits, tensors.at("logits")) <= 1e-5);
      auto masked = input;
      // A position that is listed again, with an ignored label, changes nothing.
      masked.target_positions = torch::cat({positions, torch::zeros({3}, at::kLong)});
      const auto targets = torch::cat(
          {labels.flatten().index_select(0, positions), torch::full({3}, -100, at::kLong)});
      const auto output = gathers ? model->forward(masked, targets) : model->forward(input, labels);
      const auto loss = output.loss_sum / positions.numel();
      CHECK(error_of(loss, tensors.at("loss")) <= 1e-5);
      loss.backward();
      check_gradients(tensors, *model, "bert", "grad.");
    }
  }
}

TEST_CASE("packed documents of BERT read only themselves, and wrong inputs are refused") {
  const auto model = std::dynamic_pointer_cast<models::BertImpl>(
      models::make_language_model(models::read_hf_config(golden("bert")), at::kFloat));
  models::load_pretrained(*model, golden("bert"));
  const torch::NoGradGuard no_grad;
  torch::manual_seed(5);
  const auto ids = torch::randint(1, 53, {1, 16}, torch::kLong);
  const auto positions = torch::cat({torch::arange(6), torch::arange(10)}).unsqueeze(0);
  const auto packed =
      model->hidden_states({.input_ids = ids,
                            .position_ids = positions,
                            .document_offsets = torch::tensor({0, 6, 16}, torch::kInt),
                            .max_document_length = 10});
  const auto first = model->hidden_states({.input_ids = ids.narrow(1, 0, 6)});
  const auto second = model->hidden_states({.input_ids = ids.narrow(1, 6, 10)});
  CHECK(error_of(packed, torch::cat({first, second}, 1)) <= 1e-5);
  CHECK_THROWS_WITH(model->hidden_states({.input_ids = ids.repeat({1, 2})}),
                    Catch::Contains("32 tokens is longer than the model's 24 positions"));
  CHECK_THROWS_WITH(model->hidden_states({.input_ids = ids, .token_type_ids = ids.narrow(1, 0, 3)}),
                    Catch::Contains("token_type_ids must have the shape"));
  // A BERT of three layers lacks the third one's keys in this file.
  auto options = model->options();
  options.num_layers = 3;
  models::Bert deeper(options);
  CHECK_THROWS_WITH(models::load_pretrained(*deeper, golden("bert")),
                    Catch::Contains("bert.encoder.layer.2.attention.self.query.weight"));
}

TEST_CASE("recomputed layers and a loss in chunks give the same gradients") {
  for (const std::string name : {"qwen2", "gpt2"}) {
    auto c = load_case(name);
    c.model->computation().checkpoint_every = 1;
    c.model->computation().loss_chunk_tokens = 5;
    std::string prefix = "grad.";
    if (name == "qwen2") {
      models::add_adapter(*c.model, golden(name) + "/adapter");
      prefix += "base_model.model.";
    }
    check_forward(c, name, name == "qwen2" ? "adapter." : "").backward();
    check_gradients(c.golden, *c.model, name, prefix);
  }
}
