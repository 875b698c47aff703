// SPDX-License-Identifier: Apache-2.0
// Muon's saved state and settings, and how it divides parameters into batches and batches between
// ranks.
#include <torch/torch.h>

#include <map>
#include <set>

#include "support/catch.hpp"
#include "support/same_bits.hpp"
#include "unit/optim/muon_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerImplementation;
using ddp::OptimizerOptions;
using ddp::StateDict;
using ddp::detail::MuonBatch;
using testing::same_bits;

namespace {

NamedParameters copies_of(const NamedParameters& parameters) {
  NamedParameters copies;
  for (const auto& [name, tensor] : parameters) {
    copies.push_back({name, tensor.detach().clone().requires_grad_()});
  }
  return copies;
}

// The state as two ranks have it that own a half of each tensor.
StateDict in_halves(const StateDict& state) {
  StateDict halves{.tensors = {}, .values = state.values};
  for (const auto& [key, tensor] : state.tensors) {
    if (key.slot != "momentum_buffer" && key.slot != "master") {
      halves.tensors[key] = tensor;
      continue;
    }
    const at::Tensor whole = tensor.contiguous();
    const int64_t middle = whole.numel() / 2;
    const std::pair<int64_t, int64_t> runs[] = {{middle, whole.numel() - middle}, {0, middle}};
    for (const auto& [begin, numel] : runs) {
      halves.parts[key].push_back(
          {{.sizes = whole.sizes().vec(), .strides = whole.strides().vec(), .begin = begin},
           whole.flatten().narrow(0, begin, numel)});
    }
  }
  return halves;
}

std::vector<MuonBatch> batches_of(const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<ddp::detail::ParameterSettings> settings;
  for (size_t i = 0; i < shapes.size(); ++i) {
    settings.push_back({.parameter = {"w" + std::to_string(i), at::zeros(shapes[i])}});
  }
  return ddp::detail::make_batches(settings, {});
}

bool is_left_to_adamw(const std::string& name, const OptimizerOptions& options = muon_options()) {
  const NamedParameters parameters{{name, at::zeros({4, 4})}, {"hidden", at::zeros({4, 4})}};
  const auto settings = ddp::detail::settings_of_parameters(parameters, options);
  return ddp::detail::split_for_muon(settings, options).rest.size() == 1;
}

}  // namespace

TEST_CASE("Muon's saved state continues with the same bits", "[optim]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const bool divided = GENERATE(false, true);
  auto options = muon_options();
  options.implementation = GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const NamedParameters first = muon_layers(dtype);
  auto of_first = ddp::make_optimizer(first, options);
  run_muon(*of_first, 0, 3, {.lr = kLr});
  const StateDict saved = deep_copy(of_first->state_dict());
  const NamedParameters second = copies_of(first);
  run_muon(*of_first, 3, 6, {.lr = kLr});

  options.implementation = OptimizerImplementation::List;
  auto of_second = ddp::make_optimizer(second, options);
  run_muon(*of_second, 20, 21, {.lr = 0.0});  // state of its own
  const auto version = of_second->capture_version();
  of_second->load_state_dict(divided ? in_halves(saved) : saved);
  CHECK(of_second->capture_version() > version);
  require_same_state(of_second->state_dict(), saved);
  run_muon(*of_second, 3, 6, {.lr = kLr});
  // A flat and a list AdamW differ in the last bits.
  for (size_t k = 0; k < first.size(); ++k) {
    if (saved.tensors.contains("state." + first[k].name + ".momentum_buffer")) {
      INFO(first[k].name);
      CHECK(same_bits(second[k].tensor.detach(), first[k].tensor.detach()));
    }
  }
}

TEST_CASE("Muon's state has torch.optim's slots, and only of parameters with updates", "[optim]") {
  const NamedParameters parameters = muon_layers();
  auto optimizer = ddp::make_optimizer(parameters, muon_options());
  set_muon_gradients(parameters, 0);
  parameters[1].tensor.mutable_grad().reset();  // wide
  optimizer->step(kLr);
  const auto state = optimizer->state_dict();
  std::set<std::string> slots;
  for (const auto& [key, tensor] : state.tensors) {
    slots.insert(key.parameter + "." + key.slot);
  }
  CHECK(slots.contains("tall.momentum_buffer"));
  CHECK_FALSE(slots.contains("tall.step"));
  CHECK_FALSE(slots.contains("wide.momentum_buffer"));
  for (const char* slot : {"exp_avg", "exp_avg_sq", "step"}) {
    CHECK(slots.contains(std::string("bias.") + slot));
    CHECK(slots.contains(std::string("head.weight.") + slot));
  }
  CHECK(state.parts.empty());
  // Loading removes what the saved state does not have.
  set_muon_gradients(parameters, 1);
  optimizer->step(kLr);
  CHECK(optimizer->state_dict().contains("state.wide.momentum_buffer"));
  optimizer->load_state_dict(deep_copy(state));
  CHECK_FALSE(optimizer->state_dict().contains("state.wide.momentum_buffer"));
  run_muon(*optimizer, 2, 3, {.lr = kLr});
  const at::Tensor expected =
      at::lerp(at::zeros({10, 24}), muon_gradient(parameters[1], 1, 2), 0.05);
  CHECK((optimizer->state_dict().tensors.at("state.wide.momentum_buffer") - expected)
            .abs()
            .max()
            .item<float>() <= 1e-6F);
}

TEST_CASE("Muon refuses the state of another model or rule, and then is unchanged", "[optim]") {
  const NamedParameters parameters = muon_layers();
  auto optimizer = ddp::make_optimizer(parameters, muon_options());
  run_muon(*optimizer, 0, 2, {.lr = kLr});
  const StateDict state = deep_copy(optimizer->state_dict());
  const auto refused = [&](const std::string& part, const auto& change) {
    StateDict other = deep_copy(state);
    for (auto& [key, tensor] : other.tensors) {
      tensor.add_(1);
    }
    change(other);
    CHECK(
        contains(message_of<ddp::MismatchError>([&] { optimizer->load_state_dict(other); }), part));
    require_same_state(optimizer->state_dict(), state);
  };
  refused("type is \"adamw\", here \"muon\"",
          [](StateDict& other) { other.values["type"] = std::string("adamw"); });
  refused("state.tall.momentum_buffer has shape [10, 24], here [24, 10]", [](StateDict& other) {
    other.tensors["state.tall.momentum_buffer"] = at::zeros({10, 24});
  });
  refused("state.tall.exp_avg is unexpected", [](StateDict& other) {
    other.tensors["state.tall.exp_avg"] = at::zeros({24, 10});
  });
  refused("state.bias.exp_avg is missing",
          [](StateDict& other) { other.tensors.erase("state.bias.exp_avg"); });
  refused("state.bias.momentum_buffer is unexpected",
          [](StateDict& other) { other.tensors["state.bias.momentum_buffer"] = at::zeros({24}); });
  auto adamw = muon_options();
  adamw.type = ddp::OptimizerType::AdamW;
  auto of_adamw = ddp::make_optimizer(muon_layers(), adamw);
  CHECK_THROWS_AS(of_adamw->load_state_dict(state), ddp::MismatchError);
}

TEST_CASE("Muon refuses a matrix that was replaced", "[optim]") {
  const bool before_first_step = GENERATE(true, false);
  const NamedParameters parameters = muon_layers();
  auto optimizer = ddp::make_optimizer(parameters, muon_options());
  if (!before_first_step) {
    run_muon(*optimizer, 0, 1, {.lr = kLr});
  }
  const at::Tensor& tall = parameters[0].tensor;
  tall.mutable_grad().reset();
  tall.set_data(at::zeros({10, 24}));
  set_muon_gradients(parameters, 1);
  CHECK(contains(message_of<ddp::SettingsError>([&] { optimizer->step(kLr); }),
                 "parameter tall was replaced"));
}

TEST_CASE("A load that Muon refuses for a replaced matrix changes nothing", "[optim]") {
  const NamedParameters saved = muon_layers();
  auto of_saved = ddp::make_optimizer(saved, muon_options());
  run_muon(*of_saved, 0, 1, {.lr = kLr});
  const NamedParameters parameters = muon_layers();
  auto optimizer = ddp::make_optimizer(parameters, muon_options());
  parameters[2].tensor.set_data(parameters[2].tensor.detach().to(at::kDouble));
  CHECK(contains(
      message_of<ddp::SettingsError>([&] { optimizer->load_state_dict(of_saved->state_dict()); }),
      "parameter square was replaced"));
  CHECK(optimizer->state_dict().tensors.empty());
}

TEST_CASE("Muon's settings are checked", "[optim]") {
  const auto message = [](const OptimizerOptions& options,
                          const NamedParameters& parameters = muon_layers()) {
    return message_of<ddp::SettingsError>([&] { ddp::make_optimizer(parameters, options); });
  };
  auto options = muon_options();
  options.muon.momentum = 1.0;
  CHECK(contains(message(options), "optimizer.muon.momentum is 1"));
  options = muon_options();
  options.muon.ns_steps = 0;
  CHECK(contains(message(options), "optimizer.muon.ns_steps is 0"));
  options = muon_options();
  options.zero1 = true;
  CHECK(contains(message(options), "optimizer.zero1=true"));
  options = muon_options();
  options.muon.adamw_parameters = {"*"};
  CHECK(contains(message(options), "optimizer.type=muon has no matrix to update"));
  CHECK(contains(message(muon_options(), {{"bias", leaf_of({4}, 1)}}), "set optimizer.type=adamw"));
  options = muon_options();
  options.muon.adamw_parameters = {"*", "hed.*"};
  CHECK(contains(message(options),
                 "optimizer.muon.adamw_parameters: \"hed.*\" matches no parameter"));
  options = muon_options();
  options.groups = {{.patterns = {"nothing"}, .lr_scale = 0.5}};
  CHECK(contains(message(options), "takes no parameter"));
}

TEST_CASE("Muon alone needs no AdamW", "[optim]") {
  const NamedParameters parameters{{"w", leaf_of({4, 6}, 1)}};
  auto options = muon_options();
  options.implementation = OptimizerImplementation::Flat;
  auto optimizer = ddp::make_optimizer(parameters, options);
  run_muon(*optimizer, 0, 2, {.lr = kLr});
  CHECK(optimizer->scales_gradients_in_step());
  CHECK(optimizer->state_dict().tensors.size() == 1);
  CHECK(optimizer->replicated_state().contains("state.w.momentum_buffer"));
}

TEST_CASE("Embeddings, first and last layers are left to AdamW", "[optim]") {
  for (const char* name : {"transformer.wte.weight",
                           "transformer.wpe.weight",
                           "model.embed_tokens.weight",
                           "bert.embeddings.word_embeddings.weight",
                           "bert.embeddings.position_embeddings.weight",
                           "lm_head.weight",
                           "classifier.weight",
                           "conv1.weight",
                           "fc.weight",
                           "conv_proj.weight",
                           "encoder.pos_embedding",
                           "class_token",
                           "heads.head.weight",
                           "patch_embed.proj.weight",
                           "pos_embed",
                           "cls_token",
                           "head.weight",
                           "head.fc.weight",
                           "conv_stem.weight",
                           "shared.weight",
                           "score.weight",
                           "qa_outputs.weight",
                           "features.0.0.weight",
                           "features.conv0.weight",
                           "features.1.0.layer_scale",
                           "features.1.0.attn.relative_position_bias_table",
                           "cls.seq_relationship.weight"}) {
    INFO(name);
    CHECK(is_left_to_adamw(name));
  }
  for (const char* name :
       {"transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight",
        "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight",
        "bert.encoder.layer.0.attention.self.query.weight", "layer1.0.conv1.weight",
        "layer4.0.downsample.0.weight",
        "encoder.layers.encoder_layer_0.self_attention.in_proj_weight", "blocks.0.mlp.fc1.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "cls.predictions.transform.dense.weight"}) {
    INFO(name);
    CHECK_FALSE(is_left_to_adamw(name));
  }
  auto options = muon_options();
  options.muon.adamw_parameters = {};
  CHECK_FALSE(is_left_to_adamw("lm_head.weight", options));
}

TEST_CASE("A shared weight is left to AdamW if any of its names is", "[optim]") {
  const at::Tensor shared = at::zeros({4, 4});
  const at::Tensor hidden = at::zeros({4, 4});
  for (const bool embedding_first : {true, false}) {
    NamedParameters parameters{{"embed.weight", shared}, {"output.weight", shared}};
    if (!embedding_first) {
      std::swap(parameters[0], parameters[1]);
    }
    parameters.insert(parameters.end(), {{"hidden", hidden}, {"hidden_again", hidden}});
    const auto settings = ddp::detail::settings_of_parameters(parameters, muon_options());
    const auto split = ddp::detail::split_for_muon(settings, muon_options());
    REQUIRE(split.matrices.size() == 1);
    CHECK(split.matrices[0].parameter.name == "hidden");
    REQUIRE(split.rest.size() == 1);
    CHECK(split.rest[0].parameter.name == parameters[0].name);
  }
}

TEST_CASE("The log names the matrices that are left to AdamW", "[optim]") {
  const auto settings = ddp::detail::settings_of_parameters(muon_layers(), muon_options());
  const auto text = describe(ddp::detail::split_for_muon(settings, muon_options()));
  CHECK(text ==
        "optimizer.type=muon: Muon updates 12 matrices, AdamW the other 4 parameters, with these "
        "matrices: head.weight");
}

TEST_CASE("Batches have matrices of one shape up to a limit of elements", "[optim]") {
  const std::vector<std::vector<int64_t>> many(30, {256, 1024});
  auto batches = batches_of(many);
  REQUIRE(batches.size() == 4);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(batches[i].members.size() == 8);  // 2^21 elements
  }
  CHECK(batches[3].members.size() == 6);
  CHECK(batches_of({{2048, 2048}, {2048, 2048}}).size() == 2);
  // Tall and wide matrices share a batch where they have one factor.
  batches = batches_of({{8, 4}, {4, 8}, {4, 2, 2, 2}, {8, 2, 2, 1}, {4, 9}, {0, 3}});
  REQUIRE(batches.size() == 3);
  CHECK(batches[0].members.size() == 4);
  CHECK((batches[0].rows == 4 && batches[0].cols == 8));
}

TEST_CASE("Batches are divided evenly and equally on all ranks", "[optim]") {
  std::vector<std::vector<int64_t>> shapes;
  for (int i = 0; i < 12; ++i) {  // GPT-2's blocks
    shapes.insert(shapes.end(), {{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}});
  }
  for (const int world_size : {1, 2, 3, 8, 100}) {
    auto batches = batches_of(shapes);
    ddp::detail::assign_owners(batches, world_size);
    std::map<int, double> load;
    double largest = 0;
    double total = 0;
    for (const MuonBatch& batch : batches) {
      CHECK((batch.owner >= 0 && batch.owner < world_size));
      const double cost = static_cast<double>(batch.members.size()) * 768.0 * 768.0 *
                          static_cast<double>(batch.cols);
      load[batch.owner] += cost;
      largest = std::max(largest, cost);
      total += cost;
    }
    for (const auto& [rank, cost] : load) {
      CHECK(cost <= total / world_size + largest);
    }
    CHECK(load.size() == std::min<size_t>(batches.size(), static_cast<size_t>(world_size)));
  }
}
