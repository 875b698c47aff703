// SPDX-License-Identifier: Apache-2.0
// Folders of trained language models and adapters: files of others are never replaced.
#include "language/trained_folder.hpp"

#include <filesystem>
#include <memory>
#include <string>

#include "common/data_path.hpp"
#include "ddp/ddp.hpp"
#include "language/language_options.hpp"
#include "models/pretrained/hf_config.hpp"
#include "models/qwen2.hpp"
#include "models/tokens/token_dataset.hpp"
#include "support/catch.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

// Runs whose checkpoints and trained adapters (with rank 0: models) share one parent folder.
class AdapterRuns {
 public:
  explicit AdapterRuns(int64_t rank = 2) : context_(ddp::Context::create(on_cpu())) {
    module_ = std::dynamic_pointer_cast<models::Qwen2Impl>(examples::make_qwen2({}, 64, context_));
    examples::LoraSettings lora;
    lora.options.rank = rank;
    examples::add_adapters(*module_, lora);
  }

  examples::TrainedFrom from = {};
  const models::Qwen2Impl& module() const { return *module_; }

  std::string file(const std::string& name) const { return folder_.file(name); }

  /// Trains two steps from the checkpoints; returns the message if the run is refused. An empty
  /// `checkpoints` means none; an empty `path` means the folder in the checkpoints.
  std::string run(const std::string& checkpoints, const std::string& path = "") {
    ddp::CheckpointOptions options;
    options.dir = checkpoints.empty() ? "" : file(checkpoints);
    ddp::Checkpointer checkpointer(context_, options, {});
    const auto first_step = checkpointer.restore();
    const auto where = path.empty() ? options.dir + "/adapters" : file(path);
    examples::TrainedFolder trained(
        context_, checkpointer, *module_,
        {.path = where, .is_in_checkpoint_dir = path.empty(), .from = from});
    try {
      trained.open(first_step);
    } catch (const ddp::SettingsError& error) {
      return error.what();
    }
    trained.save_best(first_step + 1);
    checkpointer.save(first_step + 1);
    trained.save_last();
    CHECK(trained.summary() == "best and last in " + where);
    return "";
  }

  /// Simulates a kill after the first best, before any checkpoint is due.
  void run_until_best(const std::string& checkpoints, int64_t steps_done) {
    ddp::CheckpointOptions options;
    options.dir = file(checkpoints);
    ddp::Checkpointer checkpointer(context_, options, {});
    examples::TrainedFolder trained(
        context_, checkpointer, *module_,
        {.path = options.dir + "/adapters", .is_in_checkpoint_dir = true});
    trained.open(checkpointer.restore());
    trained.save_best(steps_done);
    CHECK(checkpointer.last_saved_step() == steps_done);
  }

 private:
  static ddp::ContextOptions on_cpu() {
    ddp::ContextOptions options;
    options.device = ddp::DeviceChoice::Cpu;
    return options;
  }

  testing::TemporaryFolder folder_;
  ddp::Context context_;
  std::shared_ptr<models::Qwen2Impl> module_;
};

}  // namespace

TEST_CASE("weights of another run are not replaced") {
  AdapterRuns runs;
  const auto other = Catch::Contains("holds the weights of another run");
  CHECK(runs.run("a") == "");
  CHECK(runs.run("a") == "");  // resumes
  CHECK_THAT(runs.run("b", "a/adapters"), other &&
                                              Catch::Contains("lora.save_dir: " + runs.file("a")) &&
                                              Catch::Contains("starts at step 0"));
  CHECK_THAT(runs.run("", "a/adapters"), other);
  CHECK(runs.run("a", "elsewhere/") == "");  // as completed by a shell
  CHECK(runs.run("a", "elsewhere/") == "");
  CHECK(runs.run("a", "elsewhere") == "");
  CHECK_THAT(runs.run("a"),
             other && Catch::Contains("checkpoint whose run wrote to " + runs.file("elsewhere")));
  // After a kill following the first best, the same job may restart.
  runs.run_until_best("f", 3);
  CHECK(runs.run("f") == "");
}

TEST_CASE("adapters belong to the checkpoints beside them, whatever their folder is called") {
  namespace fs = std::filesystem;
  AdapterRuns runs;
  const auto other = Catch::Contains("holds the weights of another run");
  CHECK(runs.run("c") == "");
  fs::rename(runs.file("c"), runs.file("d"));
  CHECK(runs.run("d") == "");
  fs::create_directory(runs.file("e"));  // its checkpoints are missing
  fs::rename(runs.file("d/adapters"), runs.file("e/adapters"));
  CHECK_THAT(runs.run("e"), other && Catch::Contains("checkpoint.dir: " + runs.file("e")));
  fs::remove_all(runs.file("e/adapters/best"));
  fs::create_directory(runs.file("e/adapters/best"));
  CHECK_THAT(runs.run("e"), other && Catch::Contains("adapters/last "));
  fs::rename(runs.file("e/adapters/last"), runs.file("e/adapters/last.old"));
  CHECK(runs.run("e") == "");  // an empty folder is no loss, and other names are kept
  CHECK(fs::exists(runs.file("e/adapters/last.old/adapter_model.safetensors")));
}

TEST_CASE("unusable folders are refused before training, and nothing in them changes") {
  namespace fs = std::filesystem;
  const int64_t rank = GENERATE(0, 2);
  AdapterRuns runs(rank);
  const std::string name = GENERATE("best", "last");
  const auto place = runs.file("proj/" + name);
  fs::create_directories(runs.file("proj"));
  const auto begin = Catch::Contains("lora.save_dir: " + place);
  testing::write_file(place, "a file");
  CHECK_THAT(runs.run("", "proj"), begin && Catch::Contains("is not a folder"));
  CHECK(testing::read_file(place) == "a file");
  fs::remove(place);
  fs::create_directory_symlink("none", place);
  CHECK_THAT(runs.run("", "proj"),
             begin && Catch::Contains("is a link to a path that does not exist"));
  fs::remove(place);
  fs::create_directory(place);
  testing::write_file(place + "/notes.txt", "precious");
  CHECK_THAT(runs.run("", "proj"),
             begin && Catch::Contains("holds notes.txt, which no run writes"));
  CHECK(testing::read_file(place + "/notes.txt") == "precious");
  fs::remove(place + "/notes.txt");
  CHECK(runs.run("a", "proj") == "");

  // Refuses the base's folder, even for the run that owns this folder.
  runs.from.base_path = runs.file("other/../proj/" + name + "/");
  fs::create_directory(runs.file("other"));
  for (const char* checkpoints : {"", "a"}) {
    CHECK_THAT(runs.run(checkpoints, "proj"),
               begin && Catch::Contains("is the base of this run (model.path)"));
  }
  runs.from.base_path = "";
  // Other files in its own folder stay.
  testing::write_file(place + "/notes.txt", "precious");
  fs::create_directory(runs.file("proj/" + name + ".old"));
  testing::write_file(runs.file("proj/" + name + ".new"), "mine");
  const auto killed = runs.file("proj/." + name + ".tmp-00112233aabbccdd");
  fs::create_directory(killed);
  testing::write_file(killed + "/config.json", "part");
  CHECK(runs.run("a", "proj") == "");
  CHECK(testing::read_file(place + "/notes.txt") == "precious");
  CHECK(testing::read_file(runs.file("proj/" + name + ".new")) == "mine");
  CHECK(fs::exists(runs.file("proj/" + name + ".old")));
  CHECK_FALSE(fs::exists(killed));
}

TEST_CASE(
    "a trained model keeps what its base has beside the weights, or gets the data's tokenizer") {
  AdapterRuns runs(0);
  const auto sample = examples::find_data_path("data/chat-sample");
  const models::TokenDataset data({.path = sample}, ddp::Split::Train);
  runs.from = {.tokens_path = sample, .end_tokens = data.tokenizer().end_tokens()};
  REQUIRE(runs.run("", "random") == "");
  const auto read = [&](const std::string& name) { return testing::read_file(runs.file(name)); };
  for (const char* file : {"/tokenizer.json", "/tokenizer_config.json"}) {
    const auto text = testing::read_file(sample + file);
    REQUIRE_FALSE(text.empty());
    CHECK(read(std::string("random/best") + file) == text);
  }
  const auto config = models::read_hf_config(runs.file("random/last"));
  CHECK(config.eos_token_ids == data.tokenizer().end_tokens());
  CHECK(config.eos_token_ids.size() == 2);

  // A base's config with more keys than known here.
  auto text = read("random/best/config.json");
  text.insert(text.find('{') + 1, "\"bos_token_id\": 7, \"a_key_of_theirs\": [1, 2], ");
  text.erase(text.rfind("\"bos_token_id\": null,"), std::string("\"bos_token_id\": null,").size());
  testing::write_file(runs.file("random/best/config.json"), text);
  testing::write_file(runs.file("random/best/generation_config.json"), "{\"top_k\": 3}");
  runs.from = {.base_path = runs.file("random/best"), .tokens_path = runs.file("none")};
  REQUIRE(runs.run("", "tuned") == "");
  CHECK(read("tuned/last/config.json") == text);
  CHECK(models::read_hf_config(runs.file("tuned/last")).bos_token_id == 7);
  for (const char* file :
       {"/tokenizer.json", "/tokenizer_config.json", "/generation_config.json"}) {
    CHECK(read(std::string("tuned/best") + file) == read(std::string("random/best") + file));
  }
  CHECK(ddp::load_safetensors(runs.file("tuned/last/model.safetensors")).tensors.size() ==
        runs.module().parameters().size());
}
