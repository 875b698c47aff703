// SPDX-License-Identifier: Apache-2.0
#include "core/settings/settings_help.hpp"

#include <sstream>

#include "core/settings/command_line.hpp"
#include "core/settings/completion.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/core/sample_options.hpp"

namespace ddp {
namespace {

// Two sections: "s" with a line of its own, "st" without.
SettingRows sample_rows() {
  SettingRows rows = list_settings("s", sample::Options{});
  for (SettingRow& row : rows) {
    row.section_doc = "Sample settings.";
    row.field.common = row.key == "s.lr";
  }
  rows.push_back(rows[2]);
  rows.back().key = "s.lr_end";
  rows.back().field.common = false;
  const SettingRows other = list_settings("st", sample::Options{});
  rows.insert(rows.end(), other.begin(), other.end());
  return rows;
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string text_of(const std::string& name) {
  return help_topic(name, sample_rows(), 80);
}

std::size_t longest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t longest = 0;
  for (std::string line; std::getline(lines, line);) {
    longest = std::max(longest, line.size());
  }
  return longest;
}

}  // namespace

TEST_CASE("the short help has usage, options, sections, most used settings and exit codes") {
  const std::string page = help_page("prog", sample_rows(), 80);
  INFO(page);
  CHECK(page.starts_with("usage: prog [--config FILE.yaml] [key=value ...]\n"));
  for (const auto& [option, meaning] : command_line_options()) {
    CHECK(mentions(page, "\n  " + option + "  "));
  }
  CHECK(mentions(page, "\n  s   Sample settings.\n"));
  CHECK(mentions(page, "\n  st  shuffle, batch_size, lr, dtype, folder, ...\n"));
  CHECK(mentions(page, "\n  s.lr=0.1  learning rate\n"));
  CHECK_FALSE(mentions(page, "s.batch_size"));
  CHECK(mentions(page, "Settings that the program does not use are refused"));
  CHECK(mentions(page, "\n  64  A setting, an argument or the environment is wrong.\n"));
}

TEST_CASE("a topic of --help is a section, a key, a prefix or all") {
  CHECK(text_of("s").starts_with("s: Sample settings.\n  s.shuffle=true\n"));
  CHECK_FALSE(mentions(text_of("s"), "st.shuffle"));
  CHECK(text_of("st").starts_with("st\n  st.shuffle=true\n"));
  CHECK(text_of("s.batch_size") ==
        "s: Sample settings.\n"
        "  s.batch_size=128\n"
        "      of a rank and step\n"
        "      Allowed: integer from 1 to 4096 (samples)\n");
  CHECK(mentions(text_of("s.lr"), "s.lr=0.1\n"));
  CHECK_FALSE(mentions(text_of("s.lr"), "s.lr_end"));
  CHECK(mentions(text_of("s.lr_"), "s.lr_end"));
  CHECK(mentions(text_of("s.inner"), "s.inner.num_tries=3\n"));
  CHECK_FALSE(mentions(text_of("s.inner"), "s.lr"));
  CHECK(mentions(text_of("s.d"),
                 "s.dtype=bf16\n      what is computed in\n      Allowed: one of bf16,"));
  CHECK_FALSE(mentions(text_of("s.d"), "s.lr"));
  for (const SettingRow& row : sample_rows()) {
    CHECK(mentions(text_of("all"), "  " + row.key + "=" + row.text() + "\n"));
  }
}

TEST_CASE("an unknown topic of --help names similar ones") {
  const auto message = [](const std::string& name) {
    return testing::message_of<SettingsError>([&] { text_of(name); });
  };
  CHECK(
      mentions(message("s.batchsize"), "--help s.batchsize: there is no such section or setting"));
  CHECK(mentions(message("s.batchsize"), "did you mean s.batch_size?"));
  CHECK(mentions(message("num_tries"), "did you mean s.inner.num_tries or st.inner.num_tries?"));
  CHECK(mentions(message("al"), "fix: Sections: s, st; all lists every setting"));
  CHECK_FALSE(mentions(message("unlike"), "did you mean"));
}

TEST_CASE("help fits the width, and only breaks lines at spaces") {
  SettingRows rows = sample_rows();
  rows.front().field.doc =
      "Words of several lines, with Größen and – other letters, repeated: "
      "words of several lines. A second sentence.";
  rows.front().field.common = true;
  for (const std::size_t width : {40, 80, 120}) {
    INFO(width);
    CHECK(longest_line(help_topic("all", rows, width)) <= width + 4);  // bytes of 3 letters
    CHECK(longest_line(help_page("prog", rows, width)) <= width + 4);
  }
  CHECK(mentions(help_topic("s.shuffle", rows, 80), "\n      Words of several lines, with Größen"));
  CHECK_FALSE(mentions(help_page("prog", rows, 80), "second sentence"));
  CHECK(mentions(help_topic("s.shuffle", rows, 80), "A second sentence.\n"));
}

TEST_CASE("completion scripts hold every key, option, section and allowed value") {
  for (const char* shell : {"bash", "zsh"}) {
    const std::string script = completion_script(shell, "my prog", sample_rows());
    INFO(script);
    for (const SettingRow& row : sample_rows()) {
      CHECK(mentions(script, row.key));
    }
    CHECK(mentions(script, "    s.dtype | st.dtype) choices='bf16 fp16 off' ;;\n"));
    CHECK(mentions(script, "    s.shuffle | st.shuffle) choices='true false' ;;\n"));
    CHECK(mentions(script, "    s.folder | st.folder) files=yes ;;\n"));
    CHECK(mentions(script, "--show-settings"));
    CHECK(mentions(script, "my_prog"));
    for (const char* word : {"@NAME@", "@KEYS@", "@SECTIONS@", "@OPTIONS@", "@VALUES@"}) {
      CHECK_FALSE(mentions(script, word));
    }
  }
}

}  // namespace ddp
