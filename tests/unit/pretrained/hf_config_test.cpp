// SPDX-License-Identifier: Apache-2.0
#include "models/pretrained/hf_config.hpp"
#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

using nlohmann::json;
using testing::message_of;
using testing::TemporaryFolder;
using testing::write_file;

// Like Qwen2-0.5B's own config.json.
json qwen2_json() {
  return json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 131072, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_sliding_window": false,
    "vocab_size": 151936})");
}

json llama_json() {
  return json::parse(R"({
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05, "hidden_act": "silu",
    "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true,
    "eos_token_id": [128001, 128008, 128009], "bos_token_id": 128000,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0})");
}

json gpt2_json() {
  return json::parse(R"({
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257})");
}

models::HfConfig read(const json& config) {
  TemporaryFolder folder;
  write_file(folder.file("config.json"), config.dump());
  return models::read_hf_config(folder.path());
}

json with(json config, const std::string& key, const json& value) {
  config[key] = value;
  return config;
}

json without(json config, const std::string& key) {
  config.erase(key);
  return config;
}

models::Qwen2Options qwen2(const json& config) {
  return std::get<models::Qwen2Options>(read(config).options);
}

template <typename E>
void expect_error(const json& config, const std::vector<std::string>& parts) {
  const auto message = message_of<E>([&] { read(config); });
  INFO(config.dump());
  CHECK_THAT(message, Catch::Contains("config.json: key \""));
  for (const auto& part : parts) {
    CHECK_THAT(message, Catch::Contains(part));
  }
}

}  // namespace

TEST_CASE("config.json of Qwen2 gives its sizes") {
  const auto config = read(qwen2_json());
  CHECK(config.model_type == "qwen2");
  CHECK(config.dtype == at::kBFloat16);
  CHECK(config.eos_token_ids == std::vector<int64_t>{151643});
  const auto& options = std::get<models::Qwen2Options>(config.options);
  CHECK(options.vocab_size == 151936);
  CHECK(options.hidden_size == 896);
  CHECK(options.intermediate_size == 4864);
  CHECK(options.num_layers == 24);
  CHECK(options.num_heads == 14);
  CHECK(options.num_kv_heads == 2);
  CHECK(options.head_dim == 64);
  CHECK(options.max_positions == 131072);
  CHECK(options.rms_norm_eps == 1e-6);
  CHECK(options.rope_theta == 1e6);
  CHECK(options.rope_scaling.scaling == "none");
  CHECK(options.qkv_bias);
  CHECK_FALSE(options.o_bias);
  CHECK(options.tie_word_embeddings);
}

TEST_CASE("config.json of Llama 3 gives its rope scaling in both layouts") {
  json newer = without(without(llama_json(), "rope_scaling"), "rope_theta");
  newer["rope_parameters"] = llama_json()["rope_scaling"];
  newer["rope_parameters"]["rope_theta"] = 500000.0;
  for (const auto& config : {llama_json(), newer}) {
    const auto options = qwen2(config);
    CHECK_FALSE(options.qkv_bias);
    CHECK(options.head_dim == 64);
    CHECK(options.rope_theta == 500000);
    CHECK(options.rope_scaling.theta == 500000);
    CHECK(options.rope_scaling.head_dim == 64);
    CHECK(options.rope_scaling.scaling == "llama3");
    CHECK(options.rope_scaling.factor == 32);
    CHECK(options.rope_scaling.low_freq_factor == 1);
    CHECK(options.rope_scaling.high_freq_factor == 4);
    CHECK(options.rope_scaling.original_max_positions == 8192);
  }
  CHECK(read(llama_json()).eos_token_ids == std::vector<int64_t>{128001, 128008, 128009});
  const auto biased = qwen2(with(with(llama_json(), "attention_bias", true), "mlp_bias", true));
  CHECK((biased.qkv_bias && biased.o_bias && biased.mlp_bias));
}

TEST_CASE("what config.json leaves out has transformers' default") {
  auto llama = llama_json();
  for (const char* key : {"num_key_value_heads", "head_dim", "rope_scaling", "rope_theta",
                          "tie_word_embeddings", "rms_norm_eps", "hidden_act", "mlp_bias"}) {
    llama.erase(key);
  }
  const auto options = qwen2(llama);
  CHECK(options.num_kv_heads == 32);
  CHECK(options.head_dim == 64);
  CHECK(options.rope_theta == 10000);
  CHECK(options.rms_norm_eps == 1e-6);
  CHECK_FALSE(options.tie_word_embeddings);
  CHECK(options.rope_scaling.scaling == "none");
  // The older key for the type, null for none, and a window that no position exceeds.
  const auto linear =
      qwen2(with(llama_json(), "rope_scaling", {{"type", "linear"}, {"factor", 4}}));
  CHECK(linear.rope_scaling.scaling == "linear");
  CHECK(linear.rope_scaling.factor == 4);
  CHECK(qwen2(with(llama_json(), "rope_scaling", nullptr)).rope_scaling.scaling == "none");
  CHECK(qwen2(with(qwen2_json(), "head_dim", nullptr)).head_dim == 64);
  auto mistral = with(llama_json(), "model_type", "mistral");
  CHECK_FALSE(qwen2(with(mistral, "sliding_window", nullptr)).qkv_bias);
  CHECK(qwen2(with(mistral, "sliding_window", 131072)).max_positions == 131072);
  CHECK(qwen2(with(mistral, "max_position_embeddings", 4096)).max_positions == 4096);
  CHECK(qwen2(with(with(qwen2_json(), "use_sliding_window", true), "max_window_layers", 24))
            .num_layers == 24);
}

TEST_CASE("config.json of GPT-2 gives its sizes") {
  const auto config = read(gpt2_json());
  const auto& options = std::get<models::Gpt2Options>(config.options);
  CHECK(options.vocab_size == 50257);
  CHECK(options.max_positions == 1024);
  CHECK(options.hidden_size == 768);
  CHECK(options.num_layers == 12);
  CHECK(options.num_heads == 12);
  CHECK(options.intermediate_size == 0);
  CHECK(options.dropout == 0.1);
  CHECK_FALSE(config.dtype);
  CHECK(std::get<models::Gpt2Options>(read(with(gpt2_json(), "n_inner", 100)).options)
            .intermediate_size == 100);
}

TEST_CASE("config.json of BERT is read, written, and refused by key") {
  const json base = {
      {"model_type", "bert"},         {"vocab_size", 100},        {"hidden_size", 24},
      {"num_hidden_layers", 3},       {"num_attention_heads", 4}, {"intermediate_size", 60},
      {"max_position_embeddings", 32}};
  const auto config = read(base);
  const auto& options = std::get<models::BertOptions>(config.options);
  CHECK(options.layer_norm_eps == 1e-12);
  CHECK(options.num_token_types == 2);
  CHECK(options.pad_token_id == 0);
  auto changed = options;
  changed.hidden_dropout = 0.25;
  changed.attention_dropout = 0.125;
  changed.pad_token_id = -1;
  const auto written =
      json::parse(models::hf_config_json(models::make_hf_config(changed, at::kFloat)));
  CHECK(written.at("architectures") == json({"BertForMaskedLM"}));
  const auto again = std::get<models::BertOptions>(read(written).options);
  CHECK(again.hidden_dropout == 0.25);
  CHECK(again.attention_dropout == 0.125);
  CHECK(again.pad_token_id == -1);
  CHECK(again.intermediate_size == 60);
  using ddp::SettingsError;
  expect_error<SettingsError>(with(base, "hidden_act", "gelu_new"), {"hidden_act", "\"gelu\""});
  expect_error<SettingsError>(with(base, "is_decoder", true), {"is_decoder"});
  expect_error<SettingsError>(with(base, "position_embedding_type", "relative_key"),
                              {"position_embedding_type"});
  expect_error<SettingsError>(with(base, "tie_word_embeddings", false), {"tie_word_embeddings"});
  expect_error<ddp::ReadError>(without(base, "vocab_size"), {"vocab_size"});
  expect_error<ddp::ReadError>(with(base, "num_attention_heads", 5), {"hidden_size"});
  CHECK_THAT(message_of<SettingsError>([&] { models::make_causal_lm(config); }),
             Catch::Contains("\"bert\" is not causal"));
}

TEST_CASE("a config.json that these models are not is refused by key") {
  using ddp::SettingsError;
  expect_error<SettingsError>(
      with(qwen2_json(), "model_type", "qwen3"),
      {"\"model_type\"", "\"qwen3\"", "qwen2, llama, mistral, gpt2 and bert"});
  expect_error<SettingsError>(with(qwen2_json(), "model_type", "t5"), {"\"t5\""});
  for (const char* type : {"yarn", "dynamic", "longrope", "su", "mrope", "proportional"}) {
    const json rope = {
        {"rope_type", type}, {"factor", 2.0}, {"original_max_position_embeddings", 8}};
    expect_error<SettingsError>(with(llama_json(), "rope_scaling", rope),
                                {"\"rope_scaling.rope_type\"", type});
    expect_error<SettingsError>(
        with(without(llama_json(), "rope_scaling"), "rope_parameters", rope),
        {"\"rope_parameters.rope_type\"", type});
  }
  expect_error<SettingsError>(
      with(llama_json(), "rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}),
      {"\"rope_scaling.type\"", "yarn"});
  expect_error<SettingsError>(with(without(llama_json(), "rope_scaling"), "rope_parameters",
                                   {{"full_attention", {{"rope_type", "default"}}}}),
                              {"\"rope_parameters\"", "kinds of layers"});
  expect_error<SettingsError>(with(llama_json(), "partial_rotary_factor", 0.5),
                              {"\"partial_rotary_factor\"", "0.5"});
  expect_error<SettingsError>(with(llama_json(), "hidden_act", "gelu"), {"\"hidden_act\"", "gelu"});
  expect_error<SettingsError>(with(gpt2_json(), "activation_function", "relu"),
                              {"\"activation_function\"", "relu"});
  expect_error<SettingsError>(with(qwen2_json(), "attention_dropout", 0.1), {"attention_dropout"});
  expect_error<SettingsError>(with(qwen2_json(), "quantization_config", {{"bits", 4}}),
                              {"quantization_config"});
  expect_error<SettingsError>(with(qwen2_json(), "torch_dtype", "float8_e4m3fn"), {"torch_dtype"});
  expect_error<SettingsError>(with(gpt2_json(), "tie_word_embeddings", false),
                              {"tie_word_embeddings"});
  expect_error<SettingsError>(with(gpt2_json(), "attn_pdrop", 0.2), {"attn_pdrop", "resid_pdrop"});
  expect_error<SettingsError>(with(gpt2_json(), "scale_attn_by_inverse_layer_idx", true),
                              {"scale_attn_by_inverse_layer_idx"});
}

TEST_CASE("a sliding window in use is refused, with what to do") {
  using ddp::SettingsError;
  const auto mistral = with(llama_json(), "model_type", "mistral");
  expect_error<SettingsError>(with(mistral, "sliding_window", 4096),
                              {"\"sliding_window\"", "max_position_embeddings to 4096"});
  expect_error<SettingsError>(mistral, {"\"sliding_window\"", "4096"});  // transformers' default
  auto qwen = with(with(qwen2_json(), "use_sliding_window", true), "sliding_window", 4096);
  qwen["max_window_layers"] = 21;
  expect_error<SettingsError>(qwen, {"\"sliding_window\""});
  qwen["layer_types"] = json::array();
  for (int i = 0; i < 24; ++i) {
    qwen["layer_types"].push_back("full_attention");
  }
  CHECK(qwen2(qwen).num_layers == 24);
  qwen["layer_types"][3] = "sliding_attention";
  expect_error<SettingsError>(qwen, {"\"sliding_window\""});
}

TEST_CASE("missing, ill-typed and unfitting keys are told by name") {
  using ddp::concat;
  using ddp::ReadError;
  for (const char* key :
       {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings"}) {
    expect_error<ReadError>(without(qwen2_json(), key), {ddp::concat('"', key, "\" is missing")});
  }
  for (const char* key : {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head"}) {
    expect_error<ReadError>(without(gpt2_json(), key), {ddp::concat('"', key, "\" is missing")});
  }
  for (const auto& [key, limit] : {std::pair{"vocab_size", "16777216"},
                                   {"hidden_size", "131072"},
                                   {"intermediate_size", "1048576"},
                                   {"num_hidden_layers", "4096"},
                                   {"num_attention_heads", "16384"},
                                   {"num_key_value_heads", "16384"},
                                   {"head_dim", "8192"},
                                   {"max_position_embeddings", "134217728"}}) {
    for (const int64_t size : {int64_t{1'000'000'000}, int64_t{1'000'000'000'000}}) {
      expect_error<ReadError>(with(qwen2_json(), key, size),
                              {concat('"', key, "\" is ", size), concat("expected 1 to ", limit)});
    }
  }
  for (const auto& [key, limit] : {std::pair{"n_embd", "131072"},
                                   {"n_inner", "1048576"},
                                   {"n_layer", "4096"},
                                   {"n_head", "16384"},
                                   {"n_positions", "134217728"}}) {
    expect_error<ReadError>(with(gpt2_json(), key, 1'000'000'000),
                            {key, concat("expected 1 to ", limit)});
  }
  expect_error<ReadError>(with(qwen2_json(), "hidden_size", "896"), {"\"896\"", "integer"});
  expect_error<ReadError>(with(qwen2_json(), "hidden_size", 896.0), {"896.0", "integer"});
  expect_error<ReadError>(with(qwen2_json(), "hidden_size", nullptr), {"is null but required"});
  expect_error<ReadError>(with(qwen2_json(), "num_hidden_layers", 0), {"is 0", "expected 1 to"});
  expect_error<ReadError>(with(qwen2_json(), "vocab_size", 1ull << 63), {"9223372036854775808"});
  expect_error<ReadError>(with(qwen2_json(), "vocab_size", -5), {"is -5"});
  expect_error<ReadError>(with(qwen2_json(), "rope_theta", "big"), {"\"rope_theta\"", "a number"});
  expect_error<ReadError>(with(qwen2_json(), "rope_theta", 0), {"\"rope_theta\""});
  expect_error<ReadError>(with(qwen2_json(), "tie_word_embeddings", 1), {"true or false"});
  expect_error<ReadError>(with(qwen2_json(), "model_type", 7), {"expected a string"});
  expect_error<ReadError>(with(qwen2_json(), "rope_scaling", "linear"), {"expected an object"});
  expect_error<ReadError>(with(qwen2_json(), "eos_token_id", "x"), {"token ids"});
  expect_error<ReadError>(with(qwen2_json(), "hidden_size", 900), {"multiple", "(14)"});
  expect_error<ReadError>(with(qwen2_json(), "num_key_value_heads", 3), {"divisor", "(14)"});
  expect_error<ReadError>(with(qwen2_json(), "head_dim", 63), {"\"head_dim\"", "even"});
  expect_error<ReadError>(with(gpt2_json(), "n_head", 7), {"\"n_embd\"", "multiple"});
  auto rope = llama_json()["rope_scaling"];
  expect_error<ReadError>(with(llama_json(), "rope_scaling", without(rope, "low_freq_factor")),
                          {"\"rope_scaling.low_freq_factor\" is missing"});
  expect_error<ReadError>(with(llama_json(), "rope_scaling", with(rope, "high_freq_factor", 1)),
                          {"\"rope_scaling.high_freq_factor\"", "more than low_freq_factor"});
  expect_error<ReadError>(with(llama_json(), "rope_scaling", with(rope, "factor", 0.5)),
                          {"\"rope_scaling.factor\" is 0.5"});
}

TEST_CASE("a config.json that is not a JSON object is refused") {
  TemporaryFolder folder;
  const auto message = [&folder] {
    return message_of<ddp::ReadError>([&] { models::read_hf_config(folder.path()); });
  };
  CHECK_THAT(message(), Catch::Contains("cannot read " + folder.file("config.json")) &&
                            Catch::Contains("No such file"));
  write_file(folder.file("config.json"), "{\"model_type\": \"qwen2\",");
  CHECK_THAT(message(), Catch::Contains("is not JSON: broken at byte"));
  write_file(folder.file("config.json"), "[1, 2]");
  CHECK_THAT(message(), Catch::Contains("is not a JSON object but of type"));
  write_file(folder.file("config.json"), "");
  CHECK_THAT(message(), Catch::Contains("is not JSON"));
  write_file(folder.file("config.json"), "{\"rope_theta\": 1e999}");
  CHECK_THAT(message(), Catch::Contains("is not JSON"));
  write_file(folder.file("config.json"), "{\"model_type\": \"\xff\"}");
  CHECK_THAT(message(), Catch::Contains("is not JSON"));
  std::string deep = "{\"model_type\": ";
  deep.append(5'000'000, '[');
  write_file(folder.file("config.json"), deep);
  CHECK_THAT(message(), Catch::Contains("nests deeper than 32 levels"));
  write_file(folder.file("config.json"), std::string((16 << 20) + 1, ' '));
  CHECK_THAT(message(), Catch::Contains("larger than 16 MiB"));
}

TEST_CASE("options written as config.json come back") {
  TemporaryFolder folder;
  for (const auto& config :
       {qwen2_json(), llama_json(), gpt2_json(), with(llama_json(), "attention_bias", true)}) {
    const auto before = read(config);
    models::write_hf_config(folder.path(), before);
    const auto after = models::read_hf_config(folder.file("config.json"));
    CHECK(models::hf_config_json(after) == models::hf_config_json(before));
    CHECK(after.eos_token_ids == before.eos_token_ids);
    CHECK(after.model_type == before.model_type);
    CHECK(after.dtype == before.dtype);
  }
  const auto llama = qwen2(llama_json());
  const auto json =
      nlohmann::json::parse(models::hf_config_json(models::make_hf_config(llama, at::kHalf)));
  CHECK(json["architectures"] == std::vector<std::string>{"LlamaForCausalLM"});
  CHECK(json["torch_dtype"] == "float16");
  CHECK(json["rope_scaling"] == llama_json()["rope_scaling"]);
  CHECK(json["rope_parameters"]["rope_theta"] == 500000);
  CHECK(json["rope_theta"] == 500000);
  models::Qwen2Options odd;
  odd.o_bias = true;
  CHECK(models::hf_model_type(odd) == "llama");
  odd.qkv_bias = false;
  CHECK_THROWS_AS(models::hf_model_type(odd), ddp::SettingsError);
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               write_file(folder.file("config.json"), gpt2_json().dump());
               models::read_qwen2_config(folder.path());
             }),
             Catch::Contains("\"model_type\" is \"gpt2\""));
}

TEST_CASE("a model that no memory holds is refused before it is made") {
  using ddp::SettingsError;
  auto huge = qwen2_json();  // each size alone is within its limit
  huge["hidden_size"] = 114'688;
  huge["num_hidden_layers"] = 4'000;
  const auto on = [](const json& config, const at::TensorOptions& options) {
    return message_of<SettingsError>([&] { models::make_causal_lm(read(config), options); });
  };
  CHECK_THAT(on(huge, at::kFloat),
             Catch::Contains("a qwen2 model of ") &&
                 Catch::Contains("GB of parameters (Float) cannot be created") &&
                 Catch::Contains("this machine has "));
  auto wide = gpt2_json();
  wide["n_embd"] = 12 * 8'192;
  wide["n_layer"] = 4'096;
  CHECK_THAT(on(wide, at::kBFloat16), Catch::Contains("a gpt2 model of "));
  // The error holds the first sentence of LibTorch's message for an unusable device.
  const auto nowhere = on(gpt2_json(), at::TensorOptions().device(at::kVulkan));
  CHECK_THAT(nowhere, Catch::Contains("a gpt2 model of 0.49") && Catch::Contains("Vulkan"));
  CHECK(nowhere.find("frame #") == std::string::npos);
}
