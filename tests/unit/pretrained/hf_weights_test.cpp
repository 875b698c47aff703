// SPDX-License-Identifier: Apache-2.0
// Weights through every route into modules of any names: data is compared bit for bit.
#include "models/pretrained/hf_weights.hpp"

#include <filesystem>

#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

using models::load_pretrained;
using models::WeightRoute;
using testing::message_of;
using testing::NamedModule;
using testing::same_bits;
using testing::TemporaryFolder;

ddp::TensorMap llama_like(at::ScalarType dtype) {
  torch::manual_seed(5);
  ddp::TensorMap tensors;
  tensors["model.embed_tokens.weight"] = torch::randn({50, 6}).to(dtype);
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    tensors[layer + "self_attn.q_proj.weight"] = torch::randn({6, 6}).to(dtype);
    tensors[layer + "self_attn.q_proj.bias"] = torch::randn({6}).to(dtype);
    tensors[layer + "mlp.down_proj.weight"] = torch::randn({6, 701}).to(dtype);
  }
  tensors["lm_head.weight"] = torch::randn({50, 6}).to(dtype);
  return tensors;
}

void expect_equal(const torch::nn::Module& module, const ddp::TensorMap& expected) {
  const auto weights = ddp::named_weights(module);
  for (const auto& [name, tensor] : expected) {
    INFO(name);
    CHECK(same_bits(weights.at(name), tensor));
  }
}

models::HfConfig any_config() {
  models::Qwen2Options options;
  return models::make_hf_config(options, at::kFloat);
}

}  // namespace

TEST_CASE("weights of each dtype arrive in each dtype, by each route") {
  TemporaryFolder folder;
  for (const auto stored : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto tensors = llama_like(stored);
    ddp::save_safetensors(folder.file("model.safetensors"), tensors);
    for (const auto wanted : {at::kFloat, at::kBFloat16}) {
      for (const auto route : {WeightRoute::Mapped, WeightRoute::Shared}) {
        ddp::TensorMap expected;
        for (const auto& [name, tensor] : tensors) {
          expected[name] = tensor.to(wanted);
        }
        NamedModule module(testing::zeros_like(expected));
        const auto load = load_pretrained(module, folder.path(), nullptr,
                                          {.route = route, .num_threads = 3, .chunk_mb = 1});
        CHECK(load.differences.empty());
        CHECK(load.num_bytes == 9096 * static_cast<int64_t>(c10::elementSize(stored)));
        expect_equal(module, expected);
      }
    }
  }
}

TEST_CASE("shards and their index load as one") {
  TemporaryFolder folder;
  const auto tensors = llama_like(at::kBFloat16);
  const NamedModule module(tensors);
  models::save_pretrained(module, any_config(), folder.file("sharded"), {.max_shard_bytes = 2000});
  const auto json = nlohmann::json::parse(
      testing::read_file(folder.file("sharded/model.safetensors.index.json")));
  CHECK(json["metadata"]["total_size"] == 2 * 9096);
  CHECK(json["weight_map"].size() == tensors.size());
  CHECK(json["weight_map"]["model.embed_tokens.weight"] == "model-00001-of-00005.safetensors");
  CHECK(std::filesystem::exists(folder.file("sharded/config.json")));
  for (const std::string path : {"sharded", "sharded/model.safetensors.index.json"}) {
    for (const auto route : {WeightRoute::Mapped, WeightRoute::Shared}) {
      NamedModule back(testing::zeros_like(tensors));
      load_pretrained(back, folder.file(path), nullptr, {.route = route, .chunk_mb = 1});
      expect_equal(back, tensors);
    }
  }
}

TEST_CASE("a module is saved whole or not at all, in the dtype asked for") {
  TemporaryFolder folder;
  const auto tensors = llama_like(at::kFloat);
  const NamedModule module(tensors);
  models::save_pretrained(module, any_config(), folder.file("a/full"), {.dtype = at::kBFloat16});
  const auto saved = ddp::load_safetensors(folder.file("a/full/model.safetensors"));
  CHECK(saved.metadata.at("format") == "pt");  // transformers refuses a file that does not say
  REQUIRE(saved.tensors.size() == tensors.size());
  for (const auto& [name, tensor] : saved.tensors) {
    CHECK(same_bits(tensor, tensors.at(name).to(at::kBFloat16)));
  }
  const auto config = nlohmann::json::parse(testing::read_file(folder.file("a/full/config.json")));
  CHECK(config["torch_dtype"] == "bfloat16");

  CHECK_THAT(message_of<ddp::SettingsError>(
                 [&] { models::save_pretrained(module, any_config(), folder.file("a/full")); }),
             Catch::Contains("is there already"));
  CHECK_THROWS_AS(models::save_pretrained(module, any_config(), "/proc/none/full"),
                  ddp::WriteError);
  CHECK_THROWS(models::save_pretrained(module, any_config(), folder.file("b"),
                                       {.dtype = at::kComplexDouble}));
  NamedModule adapted(
      {{"q_proj.weight", torch::zeros({2, 2})}, {"q_proj.lora_A.weight", torch::zeros({1, 2})}});
  CHECK_THROWS_AS(models::save_pretrained(adapted, any_config(), folder.file("c")),
                  std::invalid_argument);
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    left.push_back(entry.path().filename());
  }
  CHECK(left == std::vector<std::string>{"a"});
}

TEST_CASE("all missing, unexpected and wrongly shaped keys are listed, and nothing changes") {
  TemporaryFolder folder;
  const auto tensors = llama_like(at::kFloat);
  auto other = tensors;
  other.erase("lm_head.weight");
  other["model.layers.2.self_attn.q_proj.bias"] = torch::zeros({6});
  ddp::save_safetensors(folder.file("model.safetensors"), other);
  for (const auto route : {WeightRoute::Mapped, WeightRoute::Shared}) {
    NamedModule module(testing::zeros_like(tensors));
    const auto message = message_of<ddp::MismatchError>(
        [&] { load_pretrained(module, folder.path(), nullptr, {.route = route}); });
    CHECK_THAT(message, Catch::Contains("1 missing: lm_head.weight; 1 unexpected: "
                                        "model.layers.2.self_attn.q_proj.bias"));
    expect_equal(module, testing::zeros_like(tensors));
    const auto load =
        load_pretrained(module, folder.path(), nullptr, {.strict = false, .route = route});
    CHECK(load.differences.missing == std::vector<std::string>{"lm_head.weight"});
    CHECK(same_bits(ddp::named_weights(module).at("model.embed_tokens.weight"),
                    tensors.at("model.embed_tokens.weight")));
  }
  auto narrow = tensors;
  narrow["lm_head.weight"] = torch::zeros({50, 5});
  ddp::save_safetensors(folder.file("model.safetensors"), narrow);
  NamedModule module(testing::zeros_like(tensors));
  CHECK_THAT(message_of<ddp::MismatchError>(
                 [&] { load_pretrained(module, folder.path(), nullptr, {.strict = false}); }),
             Catch::Contains("lm_head.weight: [50, 6] in the module, [50, 5] in the file"));
}

namespace {

void save(const TemporaryFolder& folder, const ddp::TensorMap& tensors) {
  ddp::save_safetensors(folder.file("model.safetensors"), tensors);
}

/// `file` fills a module of the names in `wanted`, by each route.
void check_loads(const ddp::TensorMap& file, const ddp::TensorMap& wanted) {
  TemporaryFolder folder;
  save(folder, file);
  for (const auto route : {WeightRoute::Mapped, WeightRoute::Shared}) {
    NamedModule module(testing::zeros_like(wanted));
    load_pretrained(module, folder.path(), nullptr, {.route = route});
    expect_equal(module, wanted);
  }
}

ddp::TensorMap gpt2_like() {
  torch::manual_seed(1);
  return {{"transformer.wte.weight", torch::randn({9, 4})},
          {"transformer.h.0.attn.c_attn.bias", torch::randn({12})},
          {"transformer.h.11.attn.c_attn.bias", torch::randn({12})},
          {"transformer.ln_f.weight", torch::randn({4})}};
}

}  // namespace

TEST_CASE("names differ as transformers lets them: GPT-2") {
  const auto gpt2 = gpt2_like();
  SECTION("without its prefix, with its masks, with or without a head") {
    ddp::TensorMap file;
    for (const auto& [name, tensor] : gpt2) {
      file[name.substr(std::string("transformer.").size())] = tensor;
    }
    check_loads(file, gpt2);
    file["h.0.attn.bias"] = torch::ones({1, 1, 8, 8}).to(at::kByte);
    file["h.11.attn.masked_bias"] = torch::tensor(-1e4);
    file["lm_head.weight"] = gpt2.at("transformer.wte.weight").clone();
    check_loads(file, gpt2);
    file.erase("wte.weight");
    check_loads(file, gpt2);
  }
  TemporaryFolder folder;
  SECTION("a bias of attention that is none of the masks is not passed over") {
    auto file = gpt2;
    file["transformer.h.x.attn.bias"] = torch::ones({1});
    save(folder, file);
    NamedModule module(gpt2);
    CHECK_THROWS_AS(load_pretrained(module, folder.path()), ddp::MismatchError);
  }
  SECTION("one weight under two names") {
    auto file = gpt2;
    file["ln_f.weight"] = torch::zeros({4});
    save(folder, file);
    NamedModule module(gpt2);
    CHECK_THAT(message_of<ddp::ReadError>([&] { load_pretrained(module, folder.path()); }),
               Catch::Contains("'transformer.ln_f.weight' twice"));
  }
  SECTION("adapters stay as they are") {
    auto adapted = gpt2;
    adapted["transformer.h.0.q_proj.lora_A.weight"] = torch::randn({2, 4});
    save(folder, gpt2);
    NamedModule module(adapted);
    load_pretrained(module, folder.path());
    expect_equal(module, adapted);
  }
}

TEST_CASE("names differ as transformers lets them: Llama's wavelengths, a tied head") {
  auto llama = llama_like(at::kHalf);
  llama.erase("lm_head.weight");
  auto file = llama;
  file["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch::ones({3});
  check_loads(file, llama);
  file["lm_head.weight"] = llama["model.embed_tokens.weight"].clone();
  check_loads(file, llama);
  file["lm_head.weight"][0][0] += 1;
  TemporaryFolder folder;
  save(folder, file);
  NamedModule module(llama);
  CHECK_THAT(message_of<ddp::MismatchError>([&] { load_pretrained(module, folder.path()); }),
             Catch::Contains("lm_head.weight differs from model.embed_tokens.weight"));
}
