// SPDX-License-Identifier: Apache-2.0
// Weights by every route into modules of any names; data is compared bit for bit.
#include "models/pretrained/hf_weights.hpp"

#include <cerrno>
#include <filesystem>
#include <map>

#include "core/files/file_ops.hpp"
#include "pretrained/replace_folder.hpp"
#include "support/file_rights.hpp"
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
  CHECK(saved.metadata.at("format") == "pt");  // transformers refuses a file without this key
  REQUIRE(saved.tensors.size() == tensors.size());
  for (const auto& [name, tensor] : saved.tensors) {
    CHECK(same_bits(tensor, tensors.at(name).to(at::kBFloat16)));
  }
  const auto config = nlohmann::json::parse(testing::read_file(folder.file("a/full/config.json")));
  CHECK(config["torch_dtype"] == "bfloat16");

  CHECK_THAT(message_of<ddp::SettingsError>(
                 [&] { models::save_pretrained(module, any_config(), folder.file("a/full")); }),
             Catch::Contains("already exists"));
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

TEST_CASE("a saved model may be read by whom the umask lets") {
  TemporaryFolder folder;
  const testing::Umask umask(022);
  models::save_pretrained(NamedModule(llama_like(at::kFloat)), any_config(), folder.file("a/full"),
                          {.max_shard_bytes = 4000});
  CHECK(testing::rights_of(folder.file("a")) == 0755);
  CHECK(testing::rights_of(folder.file("a/full")) == 0755);
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.file("a/full"))) {
    INFO(entry.path());
    CHECK(testing::rights_of(entry.path()) == 0644);
    ++num_files;
  }
  CHECK(num_files > 3);  // config.json, the index and shards
}

namespace {

// Names and texts of a folder's files, except weights.
std::map<std::string, std::string> texts_in(const std::string& folder) {
  std::map<std::string, std::string> texts;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const auto name = std::filesystem::relative(entry.path(), folder).string();
    if (entry.is_regular_file()) {
      texts[name] = name.ends_with(".safetensors") ? "" : testing::read_file(entry.path());
    }
  }
  return texts;
}

// A file system that cannot exchange names; optionally every rename to `kept` fails.
class WithoutExchange : public ddp::FileOps {
 public:
  explicit WithoutExchange(std::string kept = "") : kept_(std::move(kept)) {}
  int exchange(const char*, const char*) override {
    errno = EINVAL;
    return -1;
  }
  int rename(const char* from, const char* to) override {
    if (!kept_.empty() && to == kept_ && ++calls_ == 1) {
      errno = EACCES;
      return -1;
    }
    return FileOps::rename(from, to);
  }

 private:
  std::string kept_;
  int calls_ = 0;
};

}  // namespace

TEST_CASE("a model takes the place of an older one, and of nothing else in its folder") {
  TemporaryFolder folder;
  const auto tensors = llama_like(at::kFloat);
  const NamedModule old_module(tensors), module(llama_like(at::kBFloat16));
  const auto path = folder.file("run/best");
  models::save_pretrained(old_module, any_config(), path,
                          {.max_shard_bytes = 4000, .files = {{"tokenizer.json", "{}"}}});
  CHECK_FALSE(models::find_other_file(path));
  testing::write_file(path + "/notes.txt", "precious");
  std::filesystem::create_directory(path + "/plots");
  testing::write_file(path + "/plots/loss.csv", "1,2");
  std::filesystem::create_directory(folder.file("run/best.old"));
  testing::write_file(folder.file("run/best.new"), "mine");
  CHECK(models::find_other_file(path) == "notes.txt");
  models::save_pretrained(module, any_config(), path,
                          {.files = {{"tokenizer.json", "{2}"}}, .replace = true});
  // The older model's shards and index are gone, because transformers would read them.
  auto texts = texts_in(folder.file("run"));
  texts.erase("best/config.json");
  CHECK(texts == std::map<std::string, std::string>{{"best.new", "mine"},
                                                    {"best/model.safetensors", ""},
                                                    {"best/notes.txt", "precious"},
                                                    {"best/plots/loss.csv", "1,2"},
                                                    {"best/tokenizer.json", "{2}"}});
  CHECK(std::filesystem::exists(folder.file("run/best.old")));
  CHECK(std::distance(std::filesystem::directory_iterator(folder.file("run")), {}) == 3);
  expect_equal(module, ddp::load_safetensors(path + "/model.safetensors").tensors);

  // Replaces through a link to the folder, but neither a file nor a dangling link.
  std::filesystem::create_directory_symlink(path, folder.file("link"));
  models::save_pretrained(old_module, any_config(), folder.file("link"), {.replace = true});
  CHECK(std::filesystem::is_symlink(folder.file("link")));
  expect_equal(old_module, ddp::load_safetensors(path + "/model.safetensors").tensors);
  std::filesystem::create_directory_symlink("none", folder.file("dangling"));
  for (const char* name : {"run/best.new", "dangling"}) {
    CHECK_THROWS_AS(
        models::save_pretrained(module, any_config(), folder.file(name), {.replace = true}),
        ddp::SettingsError);
  }
}

TEST_CASE("a folder is replaced where names cannot be exchanged, and after a kill in between") {
  TemporaryFolder folder;
  const auto path = folder.file("best"), fresh = folder.file(".best.tmp-0123456789abcdef");
  const auto make = [](const std::string& where, const std::string& text) {
    std::filesystem::create_directory(where);
    testing::write_file(where + "/model.safetensors", text);
    testing::write_file(where + "/config.json", text);
  };
  const auto all = [&] { return texts_in(folder.path()); };
  make(path, "old");
  make(fresh, "new");
  testing::write_file(path + "/notes.txt", "precious");
  WithoutExchange refusing(path);  // the second rename fails: the older model is back
  const auto before = all();
  CHECK_THROWS_AS(models::detail::replace_folder(refusing, fresh, path), ddp::WriteError);
  CHECK(all() == before);
  WithoutExchange ops;
  models::detail::replace_folder(ops, fresh, path);
  const std::map<std::string, std::string> replaced{
      {"best/config.json", "new"}, {"best/model.safetensors", ""}, {"best/notes.txt", "precious"}};
  CHECK(all() == replaced);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);

  // A kill between the two renames.
  std::filesystem::rename(path, folder.file(".best.old-0123456789abcdef"));
  make(fresh, "newer");
  models::restore_replaced(path);
  CHECK(all().count("best/notes.txt") == 1);
  models::finish_interrupted_save(path);
  CHECK(all() == replaced);
  // A kill after them: the older model's rest is removed, but not other files.
  make(fresh, "old");
  testing::write_file(fresh + "/more.txt", "too");
  testing::write_file(fresh + "/adapter_model.safetensors.tmp-0123456789abcdef", "part");
  for (const char* theirs :
       {".best.tmp-mine", ".best.tmp-0123456789abcde", "best.tmp-0123456789abcdef"}) {
    make(folder.file(theirs), "theirs");
  }
  models::finish_interrupted_save(path);
  auto left = all();
  CHECK(left["best/more.txt"] == "too");
  CHECK(left["best/config.json"] == "new");
  CHECK_FALSE(std::filesystem::exists(fresh));
  CHECK(left.size() == replaced.size() + 1 + 3 * 2);
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

/// `file` fills a module with the names in `wanted`, by each route.
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
