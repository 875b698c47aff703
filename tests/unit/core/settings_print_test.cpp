// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "core/settings/setting_row.hpp"
#include "core/settings/settings.hpp"
#include "support/catch.hpp"
#include "unit/core/sample_options.hpp"

namespace ddp {
namespace {

sample::Options strange() {
  sample::Options options;
  options.shuffle = false;
  options.lr = 0.1 + 0.2;  // needs 17 digits
  options.dtype = "off";   // a bool in YAML 1.1 unless quoted
  options.folder = "a \"b\"\\ : #\n\t\x7fü";
  options.milestones = {};
  options.betas = {1e-300, 0.999};
  options.tags = {"true", "12", "", "x, y", "[z]", "- q", "null"};
  options.color = sample::Color::Green;
  options.inner.timeout = std::chrono::milliseconds(1);
  return options;
}

}  // namespace

TEST_CASE("settings written as YAML read back to the same values") {
  const SettingRows rows = list_settings("s", strange());
  Settings settings;
  settings.add_yaml(settings_yaml(rows), "saved.yaml");
  sample::Options back;
  settings.read("s", back);
  settings.require_all_read();
  CHECK(back.lr == strange().lr);
  CHECK(back.folder == strange().folder);
  CHECK(back.tags == strange().tags);
  CHECK(back.milestones.empty());
  CHECK(settings_yaml(list_settings("s", back)) == settings_yaml(rows));
}

TEST_CASE("unread settings read back, whatever their names are") {
  Settings settings;
  for (const char* argument :
       {"own.a b: #=1", "own.yes=2", "own.\"\\=x", "own.deep part.1=y", "own.rate=.inf"}) {
    settings.add_override(argument);
  }
  const SettingRows rows = settings.unread_rows();
  Settings saved;
  saved.add_yaml(settings_yaml(rows), "saved.yaml");
  CHECK(settings_canonical(saved.unread_rows()) == settings_canonical(rows));
}

TEST_CASE("unread settings at the limits of keys read back") {
  std::string deepest = "s";
  for (int i = 1; i < 32; ++i) {
    deepest += ".s";
  }
  const std::string longest(250, '\x1f');  // written as four bytes each
  for (const std::string& yaml : {deepest + ": 1\n", deepest + ": [1, 2]\n", std::string()}) {
    Settings settings;
    settings.add_yaml(yaml, "run.yaml");
    settings.add_override(longest + "=1");
    const SettingRows rows = settings.unread_rows();
    REQUIRE(rows.size() == (yaml.empty() ? 1 : 2));
    Settings saved;
    saved.add_yaml(settings_yaml(rows), "saved.yaml");
    CHECK(settings_canonical(saved.unread_rows()) == settings_canonical(rows));
  }
}

TEST_CASE("settings too large to be read back are not written") {
  Settings settings;
  settings.add_override("own.text=" + std::string(300'000, '\x1f'));
  CHECK_THROWS_AS(settings_yaml(settings.unread_rows()), SettingsError);
  settings.add_override("own.text=" + std::string(250'000, '\x1f'));
  Settings saved;
  saved.add_yaml(settings_yaml(settings.unread_rows()), "saved.yaml");
  CHECK(settings_canonical(saved.unread_rows()) == settings_canonical(settings.unread_rows()));
}

TEST_CASE("settings copied as rows keep their values and are checked") {
  SettingRows rows = list_settings("s", strange());
  Settings settings;
  settings.add_rows(rows, "section s");
  sample::Options back;
  settings.read("s", back);
  settings.require_all_read();
  CHECK(settings_canonical(list_settings("s", back)) == settings_canonical(rows));
  for (SettingRow& row : rows) {
    if (row.key == "s.batch_size") {
      row.values = {"0"};
    }
  }
  settings.add_rows(rows, "section s");
  try {
    settings.read("s", back);
    FAIL("nothing was thrown");
  } catch (const SettingsError& error) {
    CHECK(std::string(error.what()).find("section s: s.batch_size=0: expected integer") == 0);
  }
}

TEST_CASE("the table marks what is not the default") {
  sample::Options options;
  options.batch_size = 256;
  const std::string table =
      settings_table(list_settings("s", options), list_settings("s", sample::Options{}));
  CHECK(table.find("* s.batch_size        256 samples\n") != std::string::npos);
  CHECK(table.find("  s.lr                0.1\n") != std::string::npos);
  CHECK(table.find("  s.inner.timeout_ms  500 ms\n") != std::string::npos);
  CHECK(table.find("  s.milestones        [30, 60]\n") != std::string::npos);
}

TEST_CASE("changed settings are those with another value than the default") {
  sample::Options options;
  options.batch_size = 256;
  options.inner.num_tries = 4;
  const SettingRows rows = list_settings("s", options);
  const SettingRows changed = changed_settings(rows, list_settings("s", sample::Options{}));
  CHECK(settings_lines(changed) == "  s.batch_size       256 samples\n  s.inner.num_tries  4\n");
  CHECK(changed_settings(rows, rows).empty());
  CHECK(changed_settings(rows, {}).size() == rows.size());
}

TEST_CASE("settings of ranks are compared but for those that may differ") {
  sample::Options here, there;
  there.folder = "/local/of/another/host";
  const auto canonical = [](const sample::Options& options) {
    return settings_canonical(list_settings("s", options));
  };
  CHECK(canonical(here) == canonical(there));
  CHECK(first_difference(canonical(here), canonical(there)).empty());
  there.inner.num_tries = 4;
  there.lr = 0.2;
  CHECK(first_difference(canonical(here), canonical(there)) ==
        "s.inner.num_tries=3 here, s.inner.num_tries=4 there");
}

TEST_CASE("documentation shows every key with default, unit, limits and meaning") {
  const SettingRows rows = list_settings("s", sample::Options{});
  CHECK(rows.size() == 11);
  const std::string page = settings_markdown(rows);
  CHECK(page.find("## s\n") != std::string::npos);
  CHECK(page.find("| `s.dtype` | `bf16` | one of bf16, fp16, off | what is computed in |\n") !=
        std::string::npos);
  CHECK(page.find("| `s.folder` | (empty) | string | where files are |\n") != std::string::npos);
  CHECK(page.find("epochs \\| steps") != std::string::npos);
  for (const SettingRow& row : rows) {
    CHECK(page.find("| `" + row.key + "` |") != std::string::npos);
  }
}

}  // namespace ddp
