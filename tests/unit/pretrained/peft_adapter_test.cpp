// SPDX-License-Identifier: Apache-2.0
// Adapters in PEFT's files: written, read back, and refused for other models.
#include "models/pretrained/peft_adapter.hpp"

#include <filesystem>

#include "core/log/log_file.hpp"
#include "support/file_rights.hpp"
#include "support/stderr_of.hpp"
#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

using nlohmann::json;
using testing::message_of;
using testing::read_file;
using testing::same_bits;
using testing::TemporaryFolder;
using testing::write_file;

models::Qwen2Options tiny(int64_t hidden = 16) {
  models::Qwen2Options options;
  options.vocab_size = 20;
  options.hidden_size = hidden;
  options.intermediate_size = 24;
  options.num_layers = 2;
  options.num_heads = 2;
  options.num_kv_heads = 1;
  options.head_dim = 8;
  options.max_positions = 32;
  return options;
}

models::Qwen2 model(int64_t hidden = 16) {
  torch::manual_seed(2);
  models::Qwen2 result(tiny(hidden));
  result->reset_parameters();
  return result;
}

void randomize_adapter(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    if (item.value().requires_grad()) {
      item.value().normal_();
    }
  }
}

models::Qwen2 adapted(const models::LoraOptions& options, int64_t hidden = 16) {
  auto result = model(hidden);
  models::add_lora(*result, options);
  randomize_adapter(*result);
  return result;
}

bool same_weights(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto x = ddp::named_weights(a);
  const auto y = ddp::named_weights(b);
  bool same = x.size() == y.size();
  for (const auto& [name, tensor] : x) {
    same = same && y.count(name) != 0 && same_bits(tensor, y.at(name));
  }
  return same;
}

const models::LoraOptions kLora{
    .rank = 4, .alpha = 6, .dropout = 0.1, .target_modules = {"q_proj", "down_proj"}};

// Changes one key in an adapter's config.
void change_config(const std::string& folder, const std::string& key, const json& value) {
  auto config = json::parse(read_file(folder + "/adapter_config.json"));
  config[key] = value;
  write_file(folder + "/adapter_config.json", config.dump());
}

}  // namespace

TEST_CASE("an adapter comes back bit for bit, into a bare model and into an adapter") {
  TemporaryFolder folder;
  const auto path = folder.file("adapter");
  const auto saved = adapted(kLora);
  std::filesystem::create_directory(path);  // an empty folder counts as none
  models::save_adapter(*saved, path, "Qwen/Qwen2-tiny");
  const auto config = json::parse(read_file(path + "/adapter_config.json"));
  CHECK(config["r"] == 4);
  CHECK(config["lora_alpha"] == 6);
  CHECK(config["lora_dropout"] == 0.1);
  CHECK(config["target_modules"] == std::vector<std::string>{"q_proj", "down_proj"});
  CHECK(config["peft_type"] == "LORA");
  CHECK(config["base_model_name_or_path"] == "Qwen/Qwen2-tiny");
  const auto tensors = ddp::load_safetensors(path + "/adapter_model.safetensors").tensors;
  CHECK(tensors.size() == 8);
  CHECK(tensors.at("base_model.model.model.layers.1.mlp.down_proj.lora_A.weight").sizes() ==
        at::IntArrayRef{4, 24});

  const auto described = models::read_adapter(path);
  CHECK(described.base_model == "Qwen/Qwen2-tiny");
  CHECK(described.lora.target_modules.size() == 4);
  auto bare = model();
  const auto summary = models::add_adapter(*bare, path);
  CHECK(summary.layers.size() == 4);
  CHECK(same_weights(*bare, *saved));
  auto other = adapted(kLora);
  models::load_adapter(*other, path);
  CHECK(same_weights(*other, *saved));

  // Saved again over the old one: other weights, and a setting that changes no function.
  auto less_dropped = kLora;
  less_dropped.dropout = 0;
  other = adapted(less_dropped);
  randomize_adapter(*other);
  CHECK(models::read_adapter(path).base_identity.empty());
  models::save_adapter(*other, path, "elsewhere", "bf16 0123");
  CHECK(models::read_adapter(path).base_model == "elsewhere");
  CHECK(models::read_adapter(path).base_identity == "bf16 0123");
  CHECK(models::read_adapter(path).lora.dropout == 0);
  models::load_adapter(*bare, path);
  CHECK(same_weights(*bare, *other));
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    CHECK_THAT(entry.path().filename().string(), Catch::Contains("adapter_"));
  }
  auto halves = model();
  models::add_adapter(*halves, path, at::kBFloat16);
  CHECK(same_bits(ddp::named_weights(*halves).at("model.layers.0.self_attn.q_proj.lora_B.weight"),
                  ddp::named_weights(*other)
                      .at("model.layers.0.self_attn.q_proj.lora_B.weight")
                      .to(at::kBFloat16)));
}

TEST_CASE("a saved adapter may be read by whom the umask lets") {
  TemporaryFolder folder;
  const testing::Umask umask(022);
  const auto module = adapted(kLora);
  for (int i = 0; i < 2; ++i) {  // created, then replaced
    models::save_adapter(*module, folder.file("adapter"));
    CHECK(testing::rights_of(folder.file("adapter")) == 0755);
    CHECK(testing::rights_of(folder.file("adapter/adapter_config.json")) == 0644);
    CHECK(testing::rights_of(folder.file("adapter/adapter_model.safetensors")) == 0644);
  }
}

TEST_CASE("layers that short names do not describe are named whole") {
  TemporaryFolder folder;
  auto options = kLora;
  options.target_modules = {"model.layers.0.*.q_proj", "k_proj"};
  models::save_adapter(*adapted(options), folder.file("adapter"));
  const auto config = json::parse(read_file(folder.file("adapter/adapter_config.json")));
  CHECK(config["target_modules"] ==
        std::vector<std::string>{"model.layers.0.self_attn.q_proj", "k_proj"});
  CHECK(config["base_model_name_or_path"].is_null());
  auto bare = model();
  CHECK(models::add_adapter(*bare, folder.file("adapter")).layers ==
        std::vector<std::string>{"model.layers.0.self_attn.q_proj",
                                 "model.layers.0.self_attn.k_proj",
                                 "model.layers.1.self_attn.k_proj"});
  change_config(folder.file("adapter"), "target_modules", ".*(q|k)_proj");  // PEFT's pattern
  auto again = model();
  models::add_adapter(*again, folder.file("adapter"));
  CHECK(same_weights(*again, *bare));
}

TEST_CASE("PEFT's exclude_modules takes layers out of target_modules") {
  TemporaryFolder folder;
  const auto path = folder.file("adapter");
  auto options = kLora;
  options.target_modules = {"q_proj", "model.layers.0.*.down_proj"};
  models::save_adapter(*adapted(options), path);
  // PEFT lists the excluded layers among the targets too.
  const std::vector<std::string> targets{"q_proj", "v_proj", "model.layers.0.mlp.down_proj",
                                         "model.layers.1.mlp.down_proj"};
  change_config(path, "target_modules", targets);
  const auto refusal = [&](const json& excluded) {
    change_config(path, "exclude_modules", excluded);
    return message_of<ddp::ReadError>([&] { models::read_adapter(path); });
  };
  CHECK(refusal({"v_proj", "layers.1.mlp.down_proj"}).empty());
  CHECK(refusal({"layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj",
                 "model.layers.1.mlp.down_proj"})
            .empty());
  CHECK(refusal(".*(v_proj|1.mlp.down_proj)").empty());
  auto bare = model();
  CHECK(models::add_adapter(*bare, path).layers ==
        std::vector<std::string>{"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj",
                                 "model.layers.1.self_attn.q_proj"});
  CHECK_THAT(refusal({"v_proj"}),
             Catch::Contains("no layer of target_modules' \"model.layers.1.mlp.down_proj\" is in"));
  CHECK_THAT(refusal(nullptr), Catch::Contains("no layer of target_modules' \"v_proj\" is in"));
  CHECK_THAT(refusal({"v_proj", "down_proj"}),
             Catch::Contains("the layer 'model.layers.0.mlp.down_proj' is of exclude_modules"));
  CHECK_THAT(refusal(3), Catch::Contains("key \"exclude_modules\" is 3, expected a list of names"));
}

TEST_CASE("an adapter of another rank, alpha, layers or base is told, and nothing changes") {
  TemporaryFolder folder;
  const auto path = folder.file("adapter");
  models::save_adapter(*adapted(kLora), path);
  const auto refusal = [&](models::LoraOptions options, int64_t hidden = 16) {
    auto own = adapted(options, hidden);
    const auto before = adapted(options, hidden);  // the same seed: the same values
    CHECK(same_weights(*own, *before));
    const auto message = message_of<ddp::MismatchError>([&] { models::load_adapter(*own, path); });
    CHECK(same_weights(*own, *before));
    return message;
  };
  auto options = kLora;
  options.rank = 8;
  CHECK_THAT(refusal(options),
             Catch::Contains(path) && Catch::Contains("its rank (r) is 4, the model's is 8"));
  options = kLora;
  options.alpha = 16;
  CHECK_THAT(refusal(options), Catch::Contains("its lora_alpha is 6, the model's is 16"));
  options = kLora;
  options.target_modules = {"q_proj", "up_proj"};
  CHECK_THAT(
      refusal(options),
      Catch::Contains("4 missing: base_model.model.model.layers.0.mlp.up_proj.lora_A.weight") &&
          Catch::Contains("4 unexpected"));
  CHECK_THAT(refusal(kLora, 32), Catch::Contains("of another shape") &&
                                     Catch::Contains("[4, 32] in the module, [4, 16] in the file"));
  auto wide = model(32);
  CHECK_THAT(message_of<ddp::MismatchError>([&] { models::add_adapter(*wide, path); }),
             Catch::Contains("another base"));
  CHECK(same_weights(*wide, *model(32)));
  models::Gpt2 gpt2(models::Gpt2Options{
      .vocab_size = 8, .max_positions = 8, .hidden_size = 8, .num_layers = 1, .num_heads = 2});
  CHECK_THAT(message_of<ddp::MismatchError>([&] { models::add_adapter(*gpt2, path); }),
             Catch::Contains("8 unexpected"));
  CHECK_THROWS_AS(models::load_adapter(*model(), path), std::invalid_argument);
  CHECK_THROWS_AS(models::save_adapter(*model(), path), std::invalid_argument);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { models::save_adapter(*adapted(options), path); }),
             Catch::Contains("describes another adapter"));
}

TEST_CASE("what PEFT has and these adapters do not is refused by name") {
  TemporaryFolder folder;
  const auto path = folder.file("adapter");
  models::save_adapter(*adapted(kLora), path);
  const auto config = read_file(path + "/adapter_config.json");
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, json>>{{"peft_type", "IA3"},
                                                 {"bias", "lora_only"},
                                                 {"use_dora", true},
                                                 {"use_rslora", true},
                                                 {"modules_to_save", {"lm_head"}},
                                                 {"rank_pattern", {{"q_proj", 8}}},
                                                 {"alpha_pattern", {{"q_proj", 8}}},
                                                 {"fan_in_fan_out", true},
                                                 {"init_lora_weights", "pissa_niter_16"},
                                                 {"layer_replication", {{0, 1}}},
                                                 {"lora_bias", true},
                                                 {"an_option_of_next_year", 3}}) {
    write_file(path + "/adapter_config.json", config);
    change_config(path, key, value);
    auto bare = model();
    CHECK_THAT(message_of<ddp::SettingsError>([&] { models::add_adapter(*bare, path); }),
               Catch::Contains("adapter_config.json: key \"" + key + "\""));
    CHECK(same_weights(*bare, *model()));
  }
}

TEST_CASE("broken adapter files are told by file and key") {
  TemporaryFolder folder;
  const auto path = folder.file("adapter");
  const auto weights = path + "/adapter_model.safetensors";
  models::save_adapter(*adapted(kLora), path);
  const auto config = read_file(path + "/adapter_config.json");
  const auto tensors = ddp::load_safetensors(weights).tensors;
  const std::string first = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight";
  const auto refusal = [&] {
    return message_of<ddp::ReadError>([&] { models::read_adapter(path); });
  };
  for (const auto& [key, value, part] : std::vector<std::tuple<std::string, json, std::string>>{
           {"r", nullptr, "is null but required"},
           {"r", 0, "expected 1 to"},
           {"r", "4", "integer"},
           {"r", 8, "[4, 24], but adapter_config.json says r = 8"},
           {"lora_alpha", nullptr, "is null"},
           {"lora_dropout", 1.5, "expected 0 to"},
           {"target_modules", nullptr, "is missing"},
           {"target_modules", {1}, "expected a list of names"},
           {"target_modules", json::object(), "expected a list of names"},
           {"target_modules", {"q_proj"}, "down_proj' is not of target_modules"},
           {"target_modules", {"q_proj", "down_proj", "k_proj"}, "\"k_proj\" is in the file"}}) {
    write_file(path + "/adapter_config.json", config);
    change_config(path, key, value);
    CHECK_THAT(refusal(), Catch::Contains(part));
  }
  write_file(path + "/adapter_config.json", config);
  auto changed = tensors;
  changed.erase(first);
  ddp::save_safetensors(weights, changed);
  CHECK_THAT(refusal(), Catch::Contains("lacks '" + first + "'"));
  changed = tensors;
  changed[first] = changed[first].to(at::kInt);
  ddp::save_safetensors(weights, changed);
  CHECK_THAT(refusal(), Catch::Contains("of dtype Int"));
  changed = tensors;
  changed["base_model.model.model.embed_tokens.lora_embedding_A"] = torch::zeros({4, 20});
  ddp::save_safetensors(weights, changed);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { models::read_adapter(path); }),
             Catch::Contains("lora_embedding_A"));
  ddp::save_safetensors(weights, {});
  CHECK_THAT(refusal(), Catch::Contains("holds no tensor"));
  ddp::save_safetensors(weights, tensors);
  const auto bytes = read_file(weights);
  write_file(weights, bytes.substr(0, bytes.size() - 2));
  CHECK_THAT(refusal(), Catch::Contains("truncated"));
  std::filesystem::remove(weights);
  CHECK_THAT(refusal(), Catch::Contains("cannot read " + weights));
  write_file(path + "/adapter_model.bin", "x");
  CHECK_THAT(refusal(), Catch::Contains("adapter_model.bin again"));
}

TEST_CASE("base and adapter merge into a full folder") {
  TemporaryFolder folder;
  auto base = model();
  base->to(at::kBFloat16);
  auto config = models::make_hf_config(tiny(), at::kFloat);
  models::save_pretrained(*base, config, folder.file("base"));
  write_file(folder.file("base/tokenizer.json"), "{\"a\": 1}");
  auto saved_config = json::parse(read_file(folder.file("base/config.json")));
  saved_config["a_key_of_theirs"] = 7;
  write_file(folder.file("base/config.json"), saved_config.dump());
  const auto trained_over = models::base_identity(*base);
  models::save_adapter(*adapted(kLora), folder.file("adapter"), "base", "BFloat16 0123");
  CHECK_THAT(
      message_of<ddp::MismatchError>([&] {
        models::merge_adapter(folder.file("base"), folder.file("adapter"), folder.file("merged"));
      }),
      Catch::Contains("trained over another base: BFloat16 0123 (base), here " + trained_over));
  CHECK_FALSE(std::filesystem::exists(folder.file("merged")));
  models::require_base(folder.file("adapter"), "Float 0123");  // a warning: not comparable
  models::save_adapter(*adapted(kLora), folder.file("adapter"), "base", trained_over);
  models::merge_adapter(folder.file("base"), folder.file("adapter"), folder.file("merged"));
  auto expected = model();
  expected->to(at::kBFloat16);
  models::add_adapter(*expected, folder.file("adapter"));
  models::merge_lora(*expected);
  auto merged =
      models::make_causal_lm(models::read_hf_config(folder.file("merged")), at::kBFloat16);
  models::load_pretrained(*merged, folder.file("merged"));
  CHECK(same_weights(*merged, *expected));
  CHECK_FALSE(same_weights(*merged, *base));
  CHECK(read_file(folder.file("merged/tokenizer.json")) == "{\"a\": 1}");
  CHECK(read_file(folder.file("merged/config.json")) == saved_config.dump());

  models::merge_adapter(folder.file("base"), folder.file("adapter"), folder.file("fp32"),
                        {.max_shard_bytes = 4000, .dtype = at::kFloat});
  const auto fp32 = json::parse(read_file(folder.file("fp32/config.json")));
  CHECK(fp32["torch_dtype"] == "float32");
  CHECK(fp32["a_key_of_theirs"] == 7);
  CHECK(std::filesystem::exists(folder.file("fp32/model.safetensors.index.json")));
  CHECK_THROWS_AS(
      models::merge_adapter(folder.file("base"), folder.file("adapter"), folder.file("fp32")),
      ddp::SettingsError);
  CHECK_THROWS_AS(
      models::merge_adapter(folder.file("base"), folder.file("nothing"), folder.file("none")),
      ddp::ReadError);
  CHECK_FALSE(std::filesystem::exists(folder.file("none")));
}

TEST_CASE("an adapter does not change its base's identity") {
  auto base = model();
  const auto before = models::base_identity(*base);
  models::add_lora(*base, kLora);
  randomize_adapter(*base);
  CHECK(models::base_identity(*base) == before);
  models::Linear linear(3, 2, true);
  const auto alone = models::base_identity(*linear);
  linear->add_lora(kLora);
  CHECK(models::base_identity(*linear) == alone);
}

// Training and merging may cast the same base to other dtypes.
TEST_CASE("a merge sums in float32, rounds once and knows its base in every dtype") {
  const auto stored = GENERATE(at::kFloat, at::kBFloat16);
  const auto trained = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  const auto output = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  CAPTURE(stored, trained, output);
  TemporaryFolder folder;
  auto base = model();
  base->to(stored);
  const auto config = models::make_hf_config(tiny(), stored);
  models::save_pretrained(*base, config, folder.file("base"));
  auto in_training = models::make_causal_lm(config, trained);
  models::load_pretrained(*in_training, folder.file("base"));
  models::save_adapter(*adapted(kLora), folder.file("adapter"), "base",
                       models::base_identity(*in_training));
  ddp::detail::append_log_to(folder.file("log.txt"));
  models::merge_adapter(folder.file("base"), folder.file("adapter"), folder.file("merged"),
                        {.dtype = output});
  CHECK_THAT(read_file(folder.file("log.txt")), !Catch::Contains("another base"));
  auto expected = models::make_causal_lm(config, at::kFloat);
  models::load_pretrained(*expected, folder.file("base"));
  models::add_adapter(*expected, folder.file("adapter"));
  models::merge_lora(*expected);
  expected->to(output);
  auto merged = models::make_causal_lm(config, output);
  models::load_pretrained(*merged, folder.file("merged"));
  CHECK(same_weights(*merged, *expected));
}

TEST_CASE("a merge over another base is refused whatever dtype the weights are merged in") {
  TemporaryFolder folder;
  const auto base = model();
  models::save_pretrained(*base, models::make_hf_config(tiny(), at::kFloat), folder.file("base"));
  models::save_adapter(*adapted(kLora), folder.file("adapter"), "base", "Float 0123");
  CHECK_THROWS_AS(models::merge_adapter(folder.file("base"), folder.file("adapter"),
                                        folder.file("merged"), {.dtype = at::kBFloat16}),
                  ddp::MismatchError);
}

TEST_CASE("saving an adapter warns of other trained parameters, which it leaves out") {
  const TemporaryFolder folder;
  auto module = adapted(kLora);
  const auto quiet =
      testing::stderr_of([&] { models::save_adapter(*module, folder.file("adapter")); });
  CHECK_THAT(quiet, !Catch::Contains("not saved"));
  for (auto& item : module->named_parameters()) {
    if (item.key().find("q_proj.bias") != std::string::npos) {
      item.value().requires_grad_(true);
    }
  }
  const auto warned =
      testing::stderr_of([&] { models::save_adapter(*module, folder.file("adapter")); });
  CHECK_THAT(warned, Catch::Contains("2 trained parameters") && Catch::Contains("q_proj.bias"));
}

TEST_CASE("a trained bias of a layer with an adapter gets its gradient, alone and joined") {
  auto options = kLora;
  if (GENERATE(false, true)) {
    options.target_modules = {"q_proj", "k_proj", "v_proj"};
  }
  auto module = adapted(options), merged = adapted(options);
  models::merge_lora(*merged);
  module->eval();  // without dropout
  const auto ids = torch::arange(12, torch::kLong).view({2, 6});
  const auto biases_of = [](models::Qwen2& of) {
    std::vector<torch::Tensor> biases;
    for (auto& item : of->named_parameters()) {
      const auto& name = item.key();
      if (name.size() > 5 && name.substr(name.size() - 5) == ".bias") {
        biases.push_back(item.value().requires_grad_(true));
      }
    }
    return biases;
  };
  const auto biases = biases_of(module), plain = biases_of(merged);
  REQUIRE(!biases.empty());
  const auto gradients_of = [&](models::Qwen2& of, const std::vector<torch::Tensor>& parameters) {
    return torch::autograd::grad({of->hidden_states({ids}).square().sum()}, parameters);
  };
  const auto got = gradients_of(module, biases), wanted = gradients_of(merged, plain);
  for (std::size_t i = 0; i < got.size(); ++i) {
    CHECK(torch::allclose(got[i], wanted[i], 1e-3, 1e-5));
  }
}
