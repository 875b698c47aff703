// SPDX-License-Identifier: Apache-2.0
#include "core/settings/settings.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "core/settings/command_line.hpp"
#include "core/settings/setting_row.hpp"
#include "support/catch.hpp"
#include "support/named_pipe.hpp"
#include "unit/core/sample_options.hpp"

namespace ddp {
namespace {

sample::Options read(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  Settings settings;
  settings.add_yaml(yaml, "run.yaml");
  for (const std::string& argument : overrides) {
    settings.add_override(argument);
  }
  sample::Options options;
  settings.read("s", options);
  settings.require_all_read();
  return options;
}

template <typename F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const SettingsError& error) {
    return error.what();
  }
  return "(no error)";
}

void check_refused(const std::string& yaml, const std::vector<std::string>& overrides,
                   const std::vector<std::string>& words) {
  const std::string message = message_of([&] { read(yaml, overrides); });
  for (const std::string& expected : words) {
    INFO(expected << " in: " << message);
    CHECK(message.find(expected) != std::string::npos);
  }
}

// Of that many parts.
std::string nested_key(int levels) {
  std::string key = "s";
  for (int i = 1; i < levels; ++i) {
    key += ".s";
  }
  return key;
}

constexpr const char* kFull = R"(# a comment
s:
  shuffle: no
  batch_size: 64
  lr: 1e-3
  dtype: "off"
  folder: /data/a b
  milestones: [10, 20]
  betas:
    - 0.5
    - .75
  tags: [x, 'y, z']
  color: green
  inner: {timeout_ms: 20, num_tries: 1}
)";

}  // namespace

TEST_CASE("a YAML file sets fields of every type") {
  const auto options = read(kFull);
  CHECK_FALSE(options.shuffle);
  CHECK(options.batch_size == 64);
  CHECK(options.lr == 1e-3);
  CHECK(options.dtype == "off");
  CHECK(options.folder == "/data/a b");
  CHECK(options.milestones == std::vector<int64_t>{10, 20});
  CHECK(options.betas == std::vector<double>{0.5, 0.75});
  CHECK(options.tags == std::vector<std::string>{"x", "y, z"});
  CHECK(options.color == sample::Color::Green);
  CHECK(options.inner.timeout == std::chrono::milliseconds(20));
  CHECK(options.inner.num_tries == 1);
}

TEST_CASE("overrides win over the file, a later one over an earlier one") {
  Settings settings;
  settings.add_override("s.batch_size=1");
  settings.add_override("s.batch_size=2");
  settings.add_yaml("s: {batch_size: 3, lr: 4}", "run.yaml");
  settings.add_override("s.milestones=1,2, 3");
  settings.add_override("s.betas=[0.25, 1]");
  settings.add_override("s.tags=");
  settings.add_override("s.folder=a=b#c");
  settings.add_override("s.inner.timeout_ms=7");
  sample::Options options;
  options.tags = {"default"};
  settings.read("s", options);
  CHECK(options.batch_size == 2);
  CHECK(options.lr == 4);
  CHECK(options.milestones == std::vector<int64_t>{1, 2, 3});
  CHECK(options.betas == std::vector<double>{0.25, 1});
  CHECK(options.tags.empty());
  CHECK(options.folder == "a=b#c");
  CHECK(options.inner.timeout == std::chrono::milliseconds(7));
}

TEST_CASE("empty files and empty sections leave the defaults") {
  for (const char* yaml : {"", "# nothing\n", "s:\n", "s: {}\n", "s:\n  inner:\n", "---\n...\n"}) {
    INFO(yaml);
    CHECK(read(yaml).batch_size == 128);
  }
}

TEST_CASE("a value of the wrong type or out of range names place, key, value, limit and fix") {
  check_refused("s:\n  lr: 1\n  batch_size: 0\n", {},
                {"run.yaml:3: s.batch_size=0: expected integer from 1 to 4096 (samples)", "fix",
                 "s.batch_size=128"});
  check_refused("", {"s.batch_size=0"}, {"argument: s.batch_size=0: expected integer from 1"});
  for (const char* bad : {"-1", "4097", "1.5", "1e3", "x", "", " 1", "+1", "0x10", "12 ",
                          "99999999999999999999", "true"}) {
    check_refused("", {std::string("s.batch_size=") + bad},
                  {std::string("s.batch_size=") + bad + ": expected integer from 1 to 4096"});
  }
  for (const char* bad : {"nan", "-0.1", "1,5", "0.1x", ""}) {
    check_refused("", {std::string("s.lr=") + bad}, {": expected number >= 0"});
  }
  CHECK(read("s: {lr: .inf}").lr == std::numeric_limits<double>::infinity());
  check_refused("", {"s.shuffle=1"}, {"s.shuffle=1: expected true or false"});
  check_refused("s: {batch_size: \"64\"}", {}, {"s.batch_size=\"64\": expected integer"});
  check_refused("s: {batch_size: [64]}", {}, {"s.batch_size=[64]: expected integer"});
  check_refused("s: {batch_size: }", {}, {"s.batch_size=(nothing): expected integer"});
  check_refused("s: {betas: 0.9}", {}, {": expected list, each number from 0 to 1", "[a, b]"});
  check_refused("", {"s.betas=0.9,1.1"}, {"s.betas=0.9,1.1: expected list, each number from 0"});
  check_refused("", {"s.milestones=1,"}, {"s.milestones=1,: expected list"});
  check_refused("", {"s.dtype=fb16"},
                {"s.dtype=fb16: expected one of bf16, fp16, off", "did you mean s.dtype=bf16?"});
  check_refused("", {"s.color=blue"}, {"s.color=blue: expected one of red, green", "s.color=red"});
  check_refused("", {"s.inner.num_tries=9999999999"}, {"s.inner.num_tries=9999999999: expected"});
  check_refused("", {"s.inner.timeout_ms=0"}, {": expected integer >= 1 (ms)"});
}

TEST_CASE("unknown keys are refused with the nearest name") {
  check_refused("s:\n  batchsize: 3\n", {},
                {"run.yaml:2: unknown setting 's.batchsize'", "did you mean s.batch_size?"});
  check_refused("", {"s.bacth_size=3"},
                {"argument: unknown setting", "did you mean s.batch_size?"});
  check_refused("", {"batch_size=3"}, {"unknown setting 'batch_size'", "mean s.batch_size?"});
  check_refused("", {"t.batch_size=3"}, {"unknown setting 't.batch_size'", "mean s.batch_size?"});
  check_refused("", {"s=3"}, {"'s' is a section"});
  check_refused("", {"other.thing=3"}, {"there is no section 'other' (sections: s)"});
  check_refused("", {"s.completely_else=3"}, {"--help all lists every key"});
  check_refused("s: {inner: {lr: 3}}", {}, {"unknown setting 's.inner.lr'"});
}

TEST_CASE("an unknown key suggests keys of sections that are read later, and the same last word") {
  const auto refusal = [](const std::string& argument) {
    Settings settings;
    settings.suggest(list_settings("t", sample::Options{}));
    settings.suggest(list_settings("u", sample::Inner{}));
    settings.add_override(argument);
    sample::Inner first;
    return message_of([&] { settings.read("s", first); });
  };
  const auto has = [](const std::string& text, const std::string& part) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  has(refusal("s.lr=3"), "unknown setting 's.lr'; did you mean t.lr?");
  has(refusal("s.tries=3"), "did you mean s.num_tries?");  // the same word in the same section
  has(refusal("s.timeout_ms2=3"), "did you mean s.timeout_ms?");
  has(refusal("s.else=3"), "--help all lists every key");
}

TEST_CASE("an override that another one replaces is told, the same value twice is not") {
  const auto told = [](const std::vector<std::string>& overrides) {
    CommandLine line;
    line.overrides = overrides;
    return repeated_overrides(line);
  };
  CHECK(told({"s.lr=1", "s.batch_size=2", "s.lr=3"}) ==
        std::vector<std::string>{
            "the command line has s.lr=1 and later s.lr=3: the later one counts"});
  CHECK(told({"s.lr=1", "s.lr=2", "s.lr=3"}).size() == 2);
  CHECK(told({"s.lr=1", "s.lr=1", "s.lr_end=2"}).empty());
}

TEST_CASE("keys that no YAML file can hold are refused") {
  for (const char* key : {".s.lr", "s..lr", "s.lr."}) {
    check_refused("", {std::string(key) + "=3"}, {key, "has an empty part"});
  }
  check_refused("? '.lr'\n: 3\n", {}, {"run.yaml:1: the key '.lr' has an empty part"});
  check_refused("", {"other.a=1", "other.a.b=2"},
                {"other.a has a value, but other.a.b is also set"});
  check_refused("", {"other.a.b=2", "other.a=1"},
                {"other.a has a value, but other.a.b is also set"});
  check_refused("other: {a: 1, a.b: 2}\n", {}, {"run.yaml:1: other.a has a value"});
  const std::string deep = nested_key(33);
  check_refused("", {deep + "=1"}, {"argument: the key 's.s.s", "deeper than 32 levels"});
  check_refused(deep + ": 1\n", {}, {"run.yaml:1: the key 's.s.s", "deeper than 32 levels"});
  const std::string long_key = "s." + std::string(249, 'a');
  check_refused("", {long_key + "=1"}, {"argument: the key 's.aaa", "longer than 250 bytes"});
  check_refused("? " + long_key + "\n: 1\n", {}, {"run.yaml:1: ", "longer than 250 bytes"});
}

TEST_CASE("sections may be read later, and misspelled ones are refused") {
  Settings settings;
  settings.add_override("mine.lr=3");
  sample::Inner inner;
  settings.read("trainer", inner);
  CHECK_THROWS_AS(settings.require_all_read(), SettingsError);
  sample::Options mine;
  settings.read("mine", mine);
  CHECK(mine.lr == 3);
  settings.require_all_read();

  settings.add_override("triner.num_tries=3");
  CHECK(message_of([&] { settings.require_all_read(); }).find("mean trainer.num_tries?") !=
        std::string::npos);
}

TEST_CASE("YAML that could harm or mislead is refused") {
  check_refused("s: {lr: &a 1, batch_size: *a}", {}, {"run.yaml:1: anchors"});
  check_refused("s: {lr: *a}", {}, {"run.yaml:1:"});
  check_refused("s: {lr: !!float 1}", {}, {"the tag"});
  check_refused("s: {lr: 1}\n---\ns: {lr: 2}\n", {}, {"second document"});
  check_refused("s:\n  lr: 1\n  lr: 2\n", {}, {"run.yaml:3: s.lr is set a second time", "yaml:2"});
  check_refused("s:\n  lr: 1\nt:\n  lr: 1\ns:\n  steps: 2\n", {},
                {"run.yaml:5: s is set a second time, first at run.yaml:1"});
  check_refused("s: {a: {lr: 1}, a: {steps: 2}}\n", {}, {"s.a is set a second time"});
  check_refused("s:\ns: {lr: 1}\n", {}, {"run.yaml:2: s is set a second time"});
  check_refused("s: {lr: 1}\ns.lr: 2\n", {}, {"s.lr is set a second time"});
  check_refused("s: [1]\n", {}, {"unknown setting 's'"});
  check_refused("- s\n", {}, {"run.yaml:1: a list is given"});
  check_refused("word\n", {}, {"must have sections"});
  check_refused("s: {tags: [[1]]}", {}, {"plain values only"});
  check_refused("s: {tags: [{a: 1}]}", {}, {"plain values only"});
  check_refused("? [a]\n: 1\n", {}, {"key must be a plain string"});
  check_refused("s: {lr: 1\n", {}, {"run.yaml:", "cannot be read as YAML"});
  check_refused("s:\n\t- 1\n", {}, {"run.yaml:"});
  for (const char* piece : {"[", "{", "{a: ", "a: [", "- ", "? "}) {
    std::string deep;
    while (deep.size() < 1'000'000) {
      deep += piece;
    }
    INFO(piece);
    CHECK_THROWS_AS(read(deep), SettingsError);
  }
  std::string nested = "s: ";
  for (int i = 0; i < 40; ++i) {
    nested += "{a: ";
  }
  check_refused(nested, {}, {"nested deeper than 32 levels"});
  check_refused(std::string((1 << 20) + 1, '#'), {}, {"larger than 1 MiB"});
}

TEST_CASE("files that cannot be read are named") {
  Settings settings;
  CHECK(message_of([&] {
          settings.add_yaml_file("/no/such.yaml");
        }).find("--config /no/such.yaml cannot be read: No such file") != std::string::npos);
  CHECK(message_of([&] { settings.add_yaml_file("/"); }).find("--config / cannot be read") !=
        std::string::npos);
  const testing::NamedPipe pipe("/tmp/ddp_settings_pipe_" + std::to_string(getpid()));
  CHECK(message_of([&] {
          settings.add_yaml_file(pipe.path());
        }).find("cannot be read: it is not a regular file; fix:") != std::string::npos);
  CHECK_FALSE(pipe.was_waited_for());
  char path[] = "/tmp/ddp_settings_XXXXXX";
  close(mkstemp(path));
  std::ofstream(path) << "s: {lr: 0.25}\n";
  settings.add_yaml_file(path);
  std::remove(path);
  sample::Options options;
  settings.read("s", options);
  CHECK(options.lr == 0.25);
}

TEST_CASE("arguments of a program") {
  const char* good[] = {"prog", "a.b=1", "--config", "x.yaml", "c.d="};
  const CommandLine line = parse_command_line(5, good);
  CHECK(line.config_file == "x.yaml");
  CHECK(line.overrides == std::vector<std::string>{"a.b=1", "c.d="});
  CHECK_FALSE(line.help);
  const char* help[] = {"prog", "--help", "--config=y"};
  CHECK(parse_command_line(3, help).help);
  CHECK(parse_command_line(3, help).config_file == "y");
  CHECK(parse_command_line(3, help).help_topic.empty());
  const auto parsed = [](const char* first, const char* second) {
    const char* arguments[] = {"prog", first, second};
    return parse_command_line(3, arguments);
  };
  CHECK(parsed("--help", "train").help_topic == "train");
  CHECK(parsed("-h", "train.lr").help_topic == "train.lr");
  CHECK(parsed("a.b=1", "--help=train").help_topic == "train");
  CHECK(parsed("--help", "a.b=1").overrides == std::vector<std::string>{"a.b=1"});
  CHECK(parsed("--help", "a.b=1").help_topic.empty());
  CHECK(parsed("--completion", "zsh").completion == "zsh");
  CHECK(parsed("--version", "--show-settings").version);
  CHECK(parsed("--version", "--show-settings").show_settings);
  CHECK(message_of([&] { parsed("--completion", "fish"); }).find("expected bash or zsh") !=
        std::string::npos);
  const auto refused = [](const char* argument) {
    const char* arguments[] = {"prog", argument};
    return message_of([&] { parse_command_line(2, arguments); });
  };
  CHECK(refused("--train.lr=3").find("write train.lr=3 without dashes") != std::string::npos);
  CHECK(refused("--verbose").find("unknown argument '--verbose'") != std::string::npos);
  CHECK(refused("-").find("unknown argument '-'") != std::string::npos);
  CHECK(refused("--config").find("exactly one file") != std::string::npos);
  Settings settings;
  CHECK(message_of([&] { settings.add_override("word"); }).find("is not key=value") !=
        std::string::npos);
  CHECK_THROWS_AS(settings.add_override("=3"), SettingsError);
}

namespace {
struct Sized {
  NumberOrAuto cap_mb = 25;
};
void describe_fields(Sized& options, FieldVisitor& visitor) {
  visitor.field({.name = "cap_mb", .doc = "size", .min = 1, .max = 64}, options.cap_mb);
}
}  // namespace

TEST_CASE("a number that may be auto") {
  const auto read_cap = [](const std::string& value) {
    Settings settings;
    settings.add_yaml("s: {cap_mb: " + value + "}", "run.yaml");
    Sized options;
    settings.read("s", options);
    // A printed value reads back to the same value.
    const auto rows = list_settings("s", options);
    CHECK(rows.at(0).text() == value);
    Settings again;
    again.add_yaml(settings_yaml(rows), "saved.yaml");
    Sized second;
    again.read("s", second);
    CHECK(second.cap_mb == options.cap_mb);
    return options.cap_mb;
  };
  CHECK(read_cap("2.5") == 2.5);
  CHECK_FALSE(read_cap("auto").has_value());
  for (const auto* bad : {"0", "-1", "65", "aut", "none"}) {
    CHECK(message_of([&] { read_cap(bad); }).find(": expected number from 1 to 64, or auto") !=
          std::string::npos);
  }
}

TEST_CASE("the nearest name") {
  const std::vector<std::string> names = {"train.batch_size", "train.lr", "data.path"};
  CHECK(detail::nearest("train.bathc_size", names) == "train.batch_size");
  CHECK(detail::nearest("data.paths", names) == "data.path");
  CHECK(detail::nearest("lr", names).empty());
  CHECK(detail::nearest("optimizer.momentum", names).empty());
  CHECK(detail::nearest("ab", {"xy"}).empty());
  CHECK(detail::nearest("", names).empty());
  CHECK(detail::nearest("Train.Batch_Size", names) == "train.batch_size");
  CHECK(detail::nearest("adamW", {"sgd", "adam", "adamw"}) == "adamw");  // not the first at 1 edit
  CHECK(detail::nearest(std::string(100'000, 'a'), names).empty());
}

}  // namespace ddp
