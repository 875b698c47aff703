// SPDX-License-Identifier: Apache-2.0
// Parts of the language examples that need no ranks.
#include <torch/torch.h>

#include <cmath>
#include <string>

#include "common/data_path.hpp"
#include "common/evaluation.hpp"
#include "common/training_report.hpp"
#include "ddp/ddp.hpp"
#include "language/base_tokenizer.hpp"
#include "language/decode_prompts.hpp"
#include "language/language_options.hpp"
#include "language/language_task.hpp"
#include "language/language_trainer.hpp"
#include "language/sample_text.hpp"
#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/hf_vocabulary.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "models/pretrained/peft_adapter.hpp"
#include "support/catch.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

TEST_CASE("API calls are equal where they mean the same") {
  const auto call = [](const std::string& text) {
    const auto found = examples::find_api_call(text);
    REQUIRE(found);
    return *found;
  };
  const auto plain =
      call(R"(Sure. <functioncall> {"name": "rate", "arguments": {"a": 1, "b": "x"}})");
  CHECK(plain.name == "rate");
  CHECK(call(R"(<functioncall>{"arguments":{"b":"x","a":1},"name":"rate"} )").canonical ==
        plain.canonical);
  CHECK(call(R"(<functioncall> {"name": "rate", "arguments": '{"a": 1,  "b": "x"}'})").canonical ==
        plain.canonical);
  CHECK(call(R"(<functioncall> {"name": "rate", "arguments": "{\"a\": 1, \"b\": \"x\"}"})")
            .canonical == plain.canonical);
  CHECK(call(R"(<functioncall> {"name": "rate", "arguments": {"a": 2, "b": "x"}})").canonical !=
        plain.canonical);
  CHECK(call(R"(<functioncall> {"name": "date", "arguments": {"a": 1, "b": "x"}})").canonical !=
        plain.canonical);
  CHECK_FALSE(examples::find_api_call(R"({"name": "rate"})"));

  const auto broken = call("<functioncall> {\"name\":  \"rate");
  CHECK(broken.name.empty());
  CHECK(broken.canonical == call("<functioncall>\n{\"name\": \"rate").canonical);
}

TEST_CASE("a prompt becomes the longest tokens that fit") {
  const models::Vocabulary vocabulary(
      examples::find_data_path("data/chat-sample/vocabulary.safetensors"));
  const std::string text = "What is the API of a model?\n";
  const auto ids = examples::encode_longest(vocabulary, text);
  CHECK(vocabulary.decode(ids) == text);
  CHECK(ids.size() < text.size());
  const models::Vocabulary characters(
      examples::find_data_path("data/text-sample/vocabulary.safetensors"));
  CHECK(examples::encode_longest(characters, "ROMEO:\n").size() == 7);
  CHECK_THROWS_WITH(examples::encode_longest(characters, "caf\xC3\xA9"),
                    Catch::Contains("sample.prompt: no token of"));
}

TEST_CASE("the best evaluation is the smallest loss, and is known after a resume") {
  testing::TemporaryFolder folder;
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  ddp::CheckpointOptions options;
  options.dir = folder.file("checkpoints");
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {});
    examples::BestEvaluation best(checkpointer);
    CHECK(best.steps_done() == -1);
    CHECK_FALSE(best.add(5, NAN));
    CHECK(best.add(10, 2.0));
    CHECK_FALSE(best.add(20, 2.0));
    CHECK(best.add(30, 1.0 / 3));
    CHECK_FALSE(best.add(40, 0.5));
    checkpointer.save(39);
  }
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {});
  CHECK(checkpointer.restore() == 40);
  examples::BestEvaluation best(checkpointer);
  best.restore();
  CHECK(best.loss() == 1.0 / 3);
  CHECK(best.steps_done() == 30);
  CHECK_FALSE(best.add(50, 1.0 / 3));
}

TEST_CASE("models are made with the sizes that settings name") {
  CHECK(examples::qwen2_options({.size = "qwen2_7b"}, 1000).vocab_size == 152064);
  CHECK(examples::qwen2_options({.size = "tiny"}, 1000).vocab_size == 1000);
  CHECK(examples::qwen2_options({.size = "tiny", .vocab_size = 1024}, 1000).vocab_size == 1024);
  const examples::Gpt2Settings odd{.hidden = 100, .heads = 3};
  CHECK_THROWS_WITH(examples::gpt2_options(odd, 10),
                    Catch::Contains("model.hidden=100 is not a multiple of model.heads=3"));
  ddp::ContextOptions alone;
  alone.device = ddp::DeviceChoice::Cpu;
  const auto context = ddp::Context::create(alone);
  const auto weights_of = [&](int64_t seed) {
    return examples::make_qwen2({.common = {.seed = seed}}, 64, context)->parameters()[0].clone();
  };
  CHECK(torch::equal(weights_of(1), weights_of(1)));
  CHECK_FALSE(torch::equal(weights_of(1), weights_of(2)));
  const auto drawn_after = [&](uint64_t context_seed, int64_t model_seed) {
    torch::manual_seed(context_seed);
    weights_of(model_seed);
    return torch::rand({8});
  };
  CHECK(torch::equal(drawn_after(1, 1), drawn_after(1, 2)));
  CHECK_FALSE(torch::equal(drawn_after(1, 1), drawn_after(2, 1)));
  auto module = examples::make_qwen2({}, 64, context);
  CHECK_THROWS_WITH(examples::make_qwen2({.common = {.init = "pretrained"}}, 64, context),
                    Catch::Contains("model.init=pretrained needs model.path"));
  CHECK_THROWS_WITH(examples::make_qwen2({.common = {.path = "base"}}, 64, context),
                    Catch::Contains("model.path=base has no effect"));
  examples::LoraSettings none;
  none.options.target_modules = {"q_prod"};
  CHECK_THROWS_AS(examples::add_adapters(*module, none), ddp::SettingsError);
}

TEST_CASE("a base and adapters are read from their folders") {
  ddp::ContextOptions alone;
  alone.device = ddp::DeviceChoice::Cpu;
  const auto context = ddp::Context::create(alone);
  testing::TemporaryFolder folder;
  const auto made = examples::make_qwen2({.common = {.seed = 5}}, 64, context);
  const auto options = examples::qwen2_options({}, 64);
  models::save_pretrained(*made, models::make_hf_config(options, at::kFloat), folder.file("base"));
  examples::Qwen2Settings settings;
  settings.common.init = "pretrained";
  settings.common.path = folder.file("base");
  settings.common.seed = 6;
  settings.common.computation.loss_chunk_tokens = 7;
  const auto loaded = examples::make_qwen2(settings, 64, context);
  CHECK(loaded->computation().loss_chunk_tokens == 7);
  const auto hash_of = [](const models::CausalLm& module) {
    ddp::NamedParameters parameters;
    for (const auto& entry : module.named_parameters()) {
      parameters.push_back({entry.key(), entry.value()});
    }
    return examples::parameter_hash(parameters);
  };
  CHECK(hash_of(*loaded) == hash_of(*made));

  examples::LoraSettings lora;
  lora.options.rank = 4;
  examples::add_adapters(*made, lora);
  for (const auto& entry : made->named_parameters()) {
    if (entry.value().requires_grad()) {
      torch::NoGradGuard no_grad;
      entry.value().normal_();
    }
  }
  models::save_adapter(*made, folder.file("adapter"));
  lora.adapter = folder.file("adapter");
  CHECK(examples::add_adapters(*loaded, lora).layers.size() == 28);
  CHECK(hash_of(*loaded) == hash_of(*made));
  settings.vocab_size = 99;
  CHECK_THROWS_WITH(examples::make_qwen2(settings, 64, context),
                    Catch::Contains("model.vocab_size=99 contradicts model.init=pretrained"));
}

TEST_CASE("token files of another tokenizer than the base's are refused or cause a warning") {
  const auto sample = examples::find_data_path("data/chat-sample");
  const models::TokenDataset data({.path = sample}, ddp::Split::Train);
  // The file in the base's folder and data/prepare_chat.py's output from it agree.
  const auto entries = models::read_hf_vocabulary(sample)->entries;
  REQUIRE(static_cast<int64_t>(entries.size()) == data.vocabulary().size());
  for (int64_t id = 0; id < data.vocabulary().size(); ++id) {
    REQUIRE(data.vocabulary().bytes(id) == entries[id]);
  }
  const auto same = examples::compare_tokenizers(data, sample);
  CHECK(same.refusal + same.warning == "");

  testing::TemporaryFolder base;
  CHECK_THAT(examples::compare_tokenizers(data, base.path()).warning,
             Catch::Contains("it is unknown whether") &&
                 Catch::Contains("this folder has no tokenizer.json"));
  const auto text = testing::read_file(sample + "/tokenizer.json");
  const auto compare_with = [&](const std::string& from, const std::string& to) {
    auto changed = text;
    for (auto at = changed.find(from); at != std::string::npos; at = changed.find(from, at + 1)) {
      changed.replace(at, from.size(), to);
    }
    REQUIRE(changed != text);
    testing::write_file(base.file("tokenizer.json"), changed);
    return examples::compare_tokenizers(data, base.path());
  };
  const auto swapped = compare_with("\"A\":", "\"~~\":");
  CHECK(swapped.warning == "");
  CHECK_THAT(swapped.refusal,
             Catch::Contains("tokens.path was not prepared with the tokenizer of model.path") &&
                 Catch::Contains("1 id, ") && Catch::Contains("which is 'A' in " + sample) &&
                 Catch::Contains("and '~~' in " + base.path()) &&
                 Catch::Contains("--tokenizer " + base.path()));
  const examples::LanguageModelSettings pretrained{.init = "pretrained", .path = base.path()};
  CHECK_THROWS_AS(examples::require_base_tokenizer(data, pretrained), ddp::DataError);
  CHECK_NOTHROW(examples::require_base_tokenizer(data, {}));

  const auto special = compare_with("<|im_end|>", "<|eot_id|>");
  CHECK(special.refusal == "");
  CHECK_THAT(special.warning, Catch::Contains("'<|im_end|>' in ") &&
                                  Catch::Contains("'<|eot_id|>' in ") &&
                                  Catch::Contains("has not learned"));
  const auto lacking = compare_with(":1535}", ":1600}");
  CHECK(lacking.refusal == "");
  CHECK_THAT(lacking.warning, Catch::Contains("1 id, 1535, which is ") &&
                                  Catch::Contains("and nothing in " + base.path()));
}

TEST_CASE("token files of another WordPiece tokenizer than the base's are refused") {
  const auto sample = examples::find_data_path("data/masked-text-sample");
  const models::TokenDataset data({.path = sample}, ddp::Split::Train);
  const auto same = examples::compare_tokenizers(data, sample);
  CHECK(same.refusal + same.warning == "");
  testing::TemporaryFolder base;
  auto text = testing::read_file(sample + "/tokenizer.json");
  const auto at = text.find("\"##ing\":");
  REQUIRE(at != std::string::npos);
  text.replace(at, 8, "\"##gni\":");
  testing::write_file(base.file("tokenizer.json"), text);
  CHECK_THAT(examples::compare_tokenizers(data, base.path()).refusal,
             Catch::Contains("1 id, ") && Catch::Contains("which is '##ing' in " + sample) &&
                 Catch::Contains("and '##gni' in " + base.path()));
}

TEST_CASE("data that cannot be evaluated are refused") {
  models::TokenDataOptions options;
  options.path = examples::find_data_path("data/chat-sample");
  CHECK_NOTHROW(examples::open_token_data(options));
  // The first tokens of each document hold no part of an answer.
  options.max_seq_len = 4;
  CHECK_THROWS_AS(examples::open_token_data(options), ddp::DataError);

  testing::TemporaryFolder folder;
  const auto text = examples::find_data_path("data/text-sample");
  std::filesystem::copy(options.path + "/eval.safetensors", folder.file("eval.safetensors"));
  std::filesystem::copy(text + "/train.safetensors", folder.file("train.safetensors"));
  options.path = folder.path();
  options.max_seq_len = 1024;
  CHECK_THROWS_WITH(examples::open_token_data(options),
                    Catch::Contains("their ids mean different text"));
}

TEST_CASE("a language task counts real tokens, and every evaluation target once") {
  models::TokenDataOptions options;
  options.path = examples::find_data_path("data/chat-sample");
  options.layout = models::TokenLayout::Pad;
  options.max_seq_len = 200;
  options.num_samples = 8;
  const auto data = examples::open_token_data(options);
  REQUIRE(data.train->size() == 8);
  const int num_ranks = 3;
  examples::EvaluationSums sums(at::kCPU);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto loader_of = [&](const std::shared_ptr<models::TokenDataset>& dataset,
                               const ddp::DistributedSampler& sampler) {
      return examples::TokenLoader(dataset, sampler, at::kCPU, {.batch_size = 4, .num_workers = 0},
                                   models::TokenCollate(*dataset));
    };
    const ddp::DistributedSampler train_sampler(data.train->size(), 0, 1);
    const ddp::DistributedSampler eval_sampler(data.eval->size(), rank, num_ranks,
                                               ddp::eval_sampler_options({}));
    auto train_loader = loader_of(data.train, train_sampler);
    auto eval_loader = loader_of(data.eval, eval_sampler);
    // A "model" whose loss is the number of counted labels, and whose answers are always correct.
    const auto count = [](const models::TokenInput&, const torch::Tensor& labels) {
      const auto counted = labels.ne(-100).sum();
      return models::LmOutput{.loss_sum = counted.to(torch::kFloat32), .num_correct = counted};
    };
    examples::LanguageTask task(
        {.forward = count, .train_loader = train_loader, .eval_loader = eval_loader});
    CHECK(task.num_batches() == 2);
    int64_t num_tokens = 0, num_targets = 0;
    for (int64_t draw = 0; draw < 2; ++draw) {
      auto batch = task.load(draw);
      const auto expected = static_cast<double>(batch.num_targets());
      const auto result = task.forward(batch);
      CHECK(result.loss.item<double>() == expected);
      CHECK(result.num_targets.on_device.item<double>() == expected);
      CHECK(result.num_targets.on_host == 0);
      bool is_visited = false;  // a captured step copies the count to the device
      for_each_tensor(batch, ddp::TensorVisitor([&](torch::Tensor& tensor) {
                        is_visited = is_visited || &tensor == &batch.target_count;
                      }));
      CHECK(is_visited);
      num_tokens += batch.num_samples();
      num_targets += batch.num_targets();
    }
    CHECK(num_tokens == data.train->statistics().num_tokens);
    CHECK(num_targets == data.train->statistics().num_targets);
    CHECK(task.num_tokens() == num_tokens);
    CHECK(task.num_positions() > num_tokens);  // documents of other lengths need padding
    task.for_each_evaluation_batch([&](const examples::LanguageBatch& batch) {
      auto result = task.evaluate(batch);
      if (rank == 0) {  // as without the count on the device
        result.num_targets = {.on_host = batch.num_targets()};
      }
      sums.add(result);
      return true;
    });
  }
  for (int i = 0; i < 3; ++i) {
    CHECK(sums.values()[i].item<int64_t>() == data.eval->statistics().num_targets);
  }
}
