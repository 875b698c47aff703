// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "core/settings/setting_row.hpp"
#include "core/settings/settings.hpp"
#include "core/settings/settings_help.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/train/config.hpp"
#include "support/catch.hpp"

namespace mine {

struct Options {
  double alpha = 0.5;
  std::string teacher = "none";
};
void describe_fields(Options& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "alpha", .doc = "weight of the teacher", .min = 0, .max = 1},
                options.alpha);
  visitor.field({.name = "teacher", .doc = "which model"}, options.teacher);
}

}  // namespace mine

namespace ddp {
namespace {

Config parse(std::vector<const char*> arguments, const std::vector<Section>& sections = {}) {
  arguments.insert(arguments.begin(), "program");
  return Config::from_command_line(static_cast<int>(arguments.size()), arguments.data(), sections);
}

std::string refusal(std::vector<const char*> arguments, const std::vector<Section>& sections = {}) {
  try {
    parse(std::move(arguments), sections);
  } catch (const SettingsError& error) {
    return error.what();
  }
  return "(accepted)";
}

std::string help_of(const std::vector<Section>& sections = {}) {
  return help_topic("all", Config::default_rows(sections), 80);
}

bool has(const std::string& text, const std::string& part) {
  INFO(part << " in: " << text);
  CHECK(text.find(part) != std::string::npos);
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("--summary reaches the models of programs without run()") {
  CHECK(parse({"--summary"}).ddp.logs_summary);
  CHECK(!parse({}).ddp.logs_summary);
}

TEST_CASE("overrides reach every section") {
  const Config config =
      parse({"train.batch_size=128", "amp.dtype=bf16", "data.format=synthetic", "sampler.seed=7",
             "loader.num_workers=3", "optimizer.type=adamw", "lr_schedule.lr=0.01",
             "metrics.log_every=5", "checkpoint.dir=/c", "ddp.bucket_cap_mb=50"});
  CHECK(config.ddp.bucket_cap_mb == 50);
  CHECK(config.metrics.configured.bucket_cap_mb == 50);
  CHECK(config.train.batch_size == 128);
  CHECK(config.amp.dtype == AmpDtype::Bf16);
  CHECK(config.data.format == DataFormat::Synthetic);
  CHECK(config.sampler.seed == 7);
  CHECK(config.loader.num_workers == 3);
  CHECK(config.optimizer.type == OptimizerType::AdamW);
  CHECK(config.lr_schedule.lr == 0.01);
  CHECK(config.metrics.log_every == 5);
  CHECK(config.checkpoint.dir == "/c");
}

TEST_CASE("some settings follow from others") {
  CHECK(parse({"train.batch_size=64"}).loader.batch_size == 64);
  CHECK(parse({"loader.batch_size=64"}).train.batch_size == 64);
  CHECK(parse({"loader.batch_size=64", "train.batch_size=64"}).train.batch_size == 64);
  has(refusal({"loader.batch_size=64", "train.batch_size=32"}),
      "train.batch_size=32 (argument) contradicts loader.batch_size=64 (argument)");
  Settings mixed;
  mixed.add_yaml("loader: {batch_size: 32}\ntrain: {batch_size: 32}", "saved.yaml");
  mixed.add_override("train.batch_size=8");
  CHECK(Config::from_settings(mixed).loader.batch_size == 8);

  for (const char* batch : {"train.batch_size=8", "loader.batch_size=8"}) {
    const auto text = refusal({batch, "loader.global_batch_size=64"});
    has(text, "has no effect on training, because loader.global_batch_size=64 (argument)");
    has(text, "fix: also set loader.global_batch_size=0");
    CHECK(parse({batch, "loader.global_batch_size=0"}).loader.batch_size == 8);
  }
  struct Shared : LoaderOptions {
    Shared() { global_batch_size = 64; }
  };
  const std::vector<Section> shares = {declare_section<Shared>("loader")};
  CHECK_THROWS_AS(parse({"train.batch_size=8"}, shares), SettingsError);
  CHECK(parse({}, shares).loader.global_batch_size == 64);
  Settings saved;
  saved.add_yaml("loader: {batch_size: 32, global_batch_size: 64}", "saved.yaml");
  CHECK(Config::from_settings(saved).loader.global_batch_size == 64);

  CHECK(Config().train.max_steps == 1000);
  CHECK(parse({"train.epochs=3"}).train.max_steps == 0);
  CHECK(parse({"train.epochs=3", "train.max_steps=7"}).train.max_steps == 7);
  CHECK(parse({"train.max_steps=70"}).lr_schedule.total_steps == 70);
  CHECK(parse({"train.max_steps=70", "lr_schedule.total_steps=9"}).lr_schedule.total_steps == 9);
  // With epochs the program computes the length: the smaller of both.
  CHECK(parse({"train.epochs=3", "train.max_steps=70"}).lr_schedule.total_steps == 0);
  CHECK(parse({"train.epochs=3"}).lr_schedule.total_steps == 0);

  const std::vector<Section> accumulates = {uses({"train.grad_accum_steps"})};
  const Config config =
      parse({"train.batch_size=64", "train.grad_accum_steps=4", "amp.dtype=fp16"}, accumulates);
  CHECK(config.metrics.configured.batch_size == 64);
  CHECK(config.metrics.configured.grad_accum_steps == 4);
  CHECK(config.metrics.configured.global_batch_size == 0);
  CHECK(parse({"loader.global_batch_size=100"}).metrics.configured.global_batch_size == 100);
  CHECK(config.metrics.configured.precision == "fp16");
  has(config.metrics.run.settings_text, "* train.batch_size");
  has(config.checkpoint.settings_text, "batch_size: 64");
}

TEST_CASE("the documented defaults hold") {
  const Config config;
  CHECK(config.checkpoint.every_minutes == 10);  // checkpoint.dir alone gives regular saves
  CHECK_FALSE(config.train.allow_tf32);          // float32 means float32
}

TEST_CASE("epochs and max_steps give the number of steps of a run") {
  CHECK(TrainOptions{.max_steps = 7}.num_steps(5) == 7);
  CHECK(TrainOptions{.max_steps = 0, .epochs = 2}.num_steps(5) == 10);
  CHECK(TrainOptions{.max_steps = 7, .epochs = 2}.num_steps(5) == 7);
  CHECK(TrainOptions{.max_steps = 70, .epochs = 2}.num_steps(5) == 10);
  CHECK_THROWS_AS((TrainOptions{.max_steps = 0}.num_steps(5)), SettingsError);
}

TEST_CASE("a run that would train nothing is refused") {
  const TrainOptions options{.epochs = 2, .batch_size = 64, .grad_accum_steps = 4};
  CHECK_THROWS_WITH(
      options.num_steps(0),
      Catch::Contains("an epoch has 0 optimizer steps") &&
          Catch::Contains("train.batch_size=64, train.grad_accum_steps=4); fix: set a smaller "
                          "train.batch_size, train.grad_accum_steps or loader.global_batch_size"));
  CHECK(TrainOptions{.max_steps = 7}.num_steps(0) == 7);  // a loop over steps alone
  has(refusal({"train.max_steps=0"}), "train.epochs=0 and train.max_steps=0");
  has(refusal({"train.max_steps=0", "train.epochs=0"}), "train.epochs=0 and train.max_steps=0");
  CHECK(parse({"train.max_steps=0", "train.epochs=1"}).train.epochs == 1);
}

TEST_CASE("wrong settings are refused before anything starts") {
  has(refusal({"train.batch_size=0"}), "argument: train.batch_size=0: expected integer from 1");
  has(refusal({"train.batchsize=8"}), "did you mean train.batch_size?");
  has(refusal({"trian.batch_size=8"}), "did you mean train.batch_size?");
  has(refusal({"batch_size=8"}), "batch_size?");
  has(refusal({"amp.dtype=float16"}), "amp.dtype=float16: expected one of");
  has(refusal({"--config", "/no/such.yaml"}), "--config /no/such.yaml cannot be read");
  has(refusal({"--train.lr=3"}), "without dashes");
  has(refusal({"optimizer.nesterov=true"}), "momentum");
  has(refusal({"optimizer.type=adamW"}), "did you mean optimizer.type=adamw?");
  has(refusal({"optimizer.lr=0.1"}),
      "unknown setting 'optimizer.lr'; did you mean lr_schedule.lr?");
  has(refusal({"train.lr=0.1"}), "unknown setting 'train.lr'; did you mean lr_schedule.lr?");
  has(refusal({"lr=0.1"}), "did you mean lr_schedule.lr?");
  has(refusal({"train.steps=5"}), "did you mean train.max_steps or train.");
}

TEST_CASE("the length of a run has no effect until the program reads it") {
  const auto unread = [](const Config& config) {
    try {
      config.require_length_used();
    } catch (const SettingsError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* length : {"train.max_steps=5", "train.epochs=2"}) {
    has(unread(parse({length})), concat("argument: ", length,
                                        " has no effect: this program's loop "
                                        "does not read it; fix: leave it out, or declare it"));
    CHECK(unread(parse({length}, {uses({"train"})})).empty());
    const Config asked = parse({length});
    CHECK(asked.train.num_steps(10) > 0);
    CHECK(unread(asked).empty());
  }
  const Config config = parse({"train.max_steps=5", "train.epochs=2"});
  const Config copy = config;
  CHECK(copy.train.max_steps == 5);
  has(unread(config), "train.epochs=2 has no effect");
  const TrainOptions options = config.train;
  CHECK(options.epochs * 2 == 4);
  CHECK(unread(config).empty());
  // libddp's own reads do not count, and 0 limits nothing.
  const Config shown = parse({"train.max_steps=5"});
  CHECK_FALSE((shown.to_yaml() + shown.to_table() + shown.to_canonical()).empty());
  CHECK_FALSE(unread(shown).empty());
  CHECK(unread(parse({"train.epochs=0"})).empty());
  Settings saved;
  saved.add_yaml(parse({}).to_yaml(), "saved.yaml");
  CHECK(unread(Config::from_settings(saved)).empty());
}

TEST_CASE("a program can name the only sections that it takes") {
  const auto sections = only_sections({"train", "ddp"}, {declare_section<mine::Options>("mine")});
  const auto help = help_page("program", Config::default_rows(sections), 80);
  for (const char* kept : {"\n  train ", "\n  ddp ", "\n  context ", "\n  mine "}) {
    has(help, kept);
  }
  for (const char* hidden : {"\n  data ", "\n  loader ", "\n  checkpoint ", "metrics."}) {
    INFO(hidden << " in: " << help);
    CHECK(help.find(hidden) == std::string::npos);
  }
  const Config config =
      parse({"ddp.bucket_cap_mb=50", "train.max_steps=3", "mine.alpha=1"}, sections);
  CHECK(config.train.max_steps == 3);
  has(refusal({"metrics.log_every=1"}, sections), "unknown setting 'metrics.log_every'");
  CHECK(parse({}, sections).to_yaml().find("metrics") == std::string::npos);
  has(refusal({}, only_sections({"train"}, {uses({"train.mixup"})})), "(accepted)");
  CHECK_THROWS_WITH(only_sections({"optimiser"}),
                    Catch::Contains("libddp has no section 'optimiser'; fix: name some of train"));
}

TEST_CASE("removed settings are refused by name, whatever their value") {
  for (const char* value : {"ring", "copy", "symmetric"}) {
    const auto setting = concat("context.communicator.nccl_algorithm=", value);
    has(refusal({setting.c_str()}), "context.communicator.nccl_algorithm was removed; delete it");
  }
}

TEST_CASE("a declared section is checked at once and shown") {
  const std::vector<Section> sections = {declare_section<mine::Options>("mine")};
  const Config config = parse({"mine.alpha=0.25"}, sections);
  has(config.to_table(), "* mine.alpha");
  has(config.to_table(), "  mine.teacher");
  has(config.to_yaml(), "mine:\n  alpha: 0.25\n");
  const Config copy = config;
  CHECK(copy.section<mine::Options>("mine").alpha == 0.25);
  CHECK(config.section<mine::Options>("mine").alpha == 0.25);
  CHECK_THROWS_AS(config.section<mine::Options>("train"), SettingsError);
  CHECK_THROWS_WITH(config.section<mine::Options>("other"),
                    Catch::Contains("Config::section(\"other\"): the program does not declare it"));
  has(refusal({"mine.alpha=2"}, sections), "mine.alpha=2: expected number from 0 to 1");
  has(refusal({"mine.alhpa=1"}, sections), "did you mean mine.alpha?");
  has(refusal({"other.alpha=1"}, sections), "unknown setting 'other.alpha'");
  has(refusal({"mine.alpha=0.25"}), "argument: unknown setting 'mine.alpha'");
  CHECK(parse({}, sections).section<mine::Options>("mine").alpha == 0.5);
  has(help_of(sections), "mine.alpha=0.5");
}

TEST_CASE("the changed settings are those of the user, without derived values") {
  const std::vector<Section> sections = {declare_section<mine::Options>("mine", "My own.")};
  CHECK(parse({}, sections).to_changed_table().empty());
  CHECK(parse({"train.max_steps=1000", "mine.teacher=none"}, sections).to_changed_table().empty());
  const Config changed =
      parse({"train.epochs=3", "loader.batch_size=8", "mine.alpha=0.25"}, sections);
  CHECK(changed.train.batch_size == 8);
  CHECK(changed.train.max_steps == 0);
  CHECK(changed.to_changed_table() ==
        "  train.epochs       3 epochs\n"
        "  loader.batch_size  8\n"
        "  mine.alpha         0.25\n");
  // The program's own default, which is not the library's, is no change.
  std::vector<Section> with_default = {
      {"train", [steps = int64_t{7}](FieldVisitor& visitor) mutable {
         visitor.field({.name = "max_steps", .doc = "d"}, steps);
       }}};
  CHECK(parse({}, with_default).to_changed_table().empty());
  CHECK(parse({"train.max_steps=1000"}, with_default).to_changed_table() ==
        "  train.max_steps  1000 steps\n");
  has(help_page("program", Config::default_rows(sections), 80), "  mine         My own.\n");
}

TEST_CASE("every section of the library has a line in --help") {
  for (const SettingRow& row : Config::default_rows()) {
    INFO(row.key);
    CHECK_FALSE(row.section_doc.empty());
  }
}

TEST_CASE("a program can change defaults of the library's settings and leave settings out") {
  const std::vector<Section> sections = {
      {"data", [](FieldVisitor&) {}},
      {"train",
       [steps = int64_t{120}, rate = 0.25](FieldVisitor& visitor) mutable {
         visitor.field({.name = "max_steps", .doc = "steps"}, steps);
         visitor.field({.name = "max_grad_norm", .doc = "limit"}, rate);
       }},
      declare_section<mine::Options>("mine")};
  const Config plain = parse({}, sections);
  CHECK(plain.train.max_steps == 120);
  CHECK(plain.train.max_grad_norm == 0.25);
  CHECK(plain.lr_schedule.total_steps == 120);
  CHECK(plain.train.batch_size == TrainOptions().batch_size);
  has(plain.to_table(), "  train.max_steps");
  const auto help = help_of(sections);
  has(help, "train.max_steps=120");
  CHECK(help.find("data.") == std::string::npos);
  CHECK(help.find("train.mixup") == std::string::npos);

  const Config changed = parse({"train.max_steps=7", "mine.alpha=0.25"}, sections);
  CHECK(changed.train.max_steps == 7);
  CHECK(changed.train.max_grad_norm == 0.25);
  has(changed.to_table(), "* train.max_steps");
  CHECK(parse({}, sections).train.max_steps == 120);  // announced once, read many times

  has(refusal({"data.path=images"}, sections), "unknown setting 'data.path'");
  has(refusal({"train.mixup=0.2"}, sections),
      "argument: unknown setting 'train.mixup': libddp has it, but this program's section train "
      "does not; fix: leave it out");
  has(refusal({"train.max_step=7"}, sections), "did you mean train.max_steps?");
  CHECK(refusal({"data.path=images"}) == "(accepted)");
  Settings saved;  // a checkpoint stores a file for the same program
  saved.add_yaml(changed.to_yaml(), "saved.yaml");
  const Config back = Config::from_settings(saved, sections);
  CHECK(back.to_canonical() == changed.to_canonical());
}

TEST_CASE("settings of a training loop exist only if the program names them") {
  for (const char* unused :
       {"train.grad_accum_steps=4", "train.max_grad_norm=1", "train.mixup=0.2", "train.cutmix=1",
        "train.label_smoothing=0.1", "train.eval_every=2", "train.eval_every_steps=5",
        "train.eval_first=true", "train.eval_batch_size=8", "train.cuda_graph=on"}) {
    const std::string setting = unused;
    const std::string key = setting.substr(0, setting.find('='));
    has(refusal({unused}), "argument: " + setting + " has no effect");
    has(refusal({unused}),
        "fix: leave it out, or declare it in ddp::run if the program's own code uses it");
    has(refusal({unused}), "{ddp::uses({\"" + key + "\"})}");
    CHECK(refusal({unused}, {uses({key})}) == "(accepted)");
    CHECK(refusal({unused}, {declare_section<mine::Options>("mine"), uses({"train"})}) ==
          "(accepted)");
    CHECK(Config().to_table().find(key) == std::string::npos);
    has(parse({unused}, {uses({key})}).to_table(), "* " + key);
    has(parse({}, {uses({key})}).to_table(), "  " + key);
    CHECK(help_of().find(key) == std::string::npos);
    has(help_of({uses({key})}), key);
  }
  has(refusal({"train.mixup=0.2"}, {uses({"train.max_grad_norm"})}),
      "train.mixup=0.2 has no effect");
  has(refusal({}, {uses({"train.mixpu"})}), "ddp::uses: libddp has no setting or section");
  Settings file;  // a file may not set unused settings, even to their defaults
  file.add_yaml("train:\n  eval_every: 1\n", "run.yaml");
  CHECK_THROWS_WITH(Config::from_settings(file), Catch::Contains("run.yaml:2: train.eval_every=1"));
}

TEST_CASE("settings of sections that no object of the library uses are refused") {
  const auto unused = [](const Config& config) {
    try {
      config.require_all_used();
    } catch (const SettingsError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* argument :
       {"ddp.bucket_cap_mb=50", "optimizer.type=adamw", "lr_schedule.lr=0.5", "amp.dtype=bf16",
        "data.num_samples=80", "sampler.seed=3", "loader.num_workers=1", "metrics.csv=true",
        "checkpoint.keep_last=3", "train.batch_size=8", "loader.batch_size=8"}) {
    const std::string setting = argument;
    has(unused(parse({argument})), "argument: " + setting + " has no effect: no object");
    CHECK(unused(parse({argument}, {uses({setting.substr(0, setting.find('='))})})).empty());
    CHECK(unused(
              parse({argument}, {uses({"train.batch_size", setting.substr(0, setting.find('.'))})}))
              .empty());
  }
  CHECK(unused(parse({"train.max_steps=3", "train.epochs=1", "train.deterministic=true",
                      "context.device=cpu"}))
            .empty());

  // Copies count, also changed ones; the program's own options do not.
  const Config config = parse({"lr_schedule.lr=0.5"});
  LrSchedule(LrScheduleOptions{.lr = 0.5});
  CHECK_FALSE(unused(config).empty());
  const Config copy = config;
  auto options = copy.lr_schedule;
  options.warmup_steps = 3;
  LrSchedule{options};
  CHECK(unused(config).empty());

  // A saved file has all keys; only its values other than defaults must be used.
  const auto from_file = [&](const std::string& text) {
    Settings settings;
    settings.add_yaml(text, "saved.yaml");
    return Config::from_settings(settings);
  };
  CHECK(unused(from_file(parse({"train.max_steps=70"}).to_yaml())).empty());
  has(unused(from_file("sampler:\n  seed: 3\n")), "saved.yaml:2: sampler.seed=3 has no effect");
}

TEST_CASE("saved settings give the same run") {
  const std::vector<Section> sections = {declare_section<mine::Options>("mine")};
  const Config config = parse({"train.batch_size=48", "train.epochs=2", "lr_schedule.lr=0.3",
                               "data.mean=0.1,0.2,0.3", "mine.teacher=a b"},
                              sections);
  Settings settings;
  settings.add_yaml(config.to_yaml(), "saved.yaml");
  const Config back = Config::from_settings(settings, sections);
  CHECK(back.to_yaml() == config.to_yaml());
  CHECK(back.to_canonical() == config.to_canonical());
  CHECK(first_difference(parse({"amp.dtype=bf16"}).to_canonical(), Config().to_canonical()) ==
        "amp.dtype=bf16 here, amp.dtype=\"off\" there");
}

}  // namespace ddp
