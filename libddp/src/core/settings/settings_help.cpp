// SPDX-License-Identifier: Apache-2.0
#include "core/settings/settings_help.hpp"

#include <algorithm>
#include <sstream>
#include <tuple>

#include "core/settings/command_line.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

// Columns of `text`, which is UTF-8.
std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// Breaks lines at spaces. The first line starts at column `at`, further ones at `indent`.
std::string wrapped(const std::string& text, std::size_t at, std::size_t indent,
                    std::size_t width) {
  std::istringstream words(text);
  std::string lines;
  std::size_t column = at;
  for (std::string word; words >> word;) {
    const std::size_t length = columns_of(word);
    if (column > indent && column + 1 + length > width) {
      lines += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (!lines.empty()) {
      lines += ' ';
      ++column;
    }
    lines += word;
    column += length;
  }
  return lines;
}

// Two columns: terms, and their meaning.
using Terms = std::vector<std::pair<std::string, std::string>>;

std::string two_columns(const Terms& terms, std::size_t width) {
  constexpr std::size_t kLongestTerm = 32;  // longer terms have their meaning on the next line
  std::size_t indent = 0;
  for (const auto& [term, meaning] : terms) {
    if (term.size() <= kLongestTerm) {
      indent = std::max(indent, term.size() + 4);
    }
  }
  std::string lines;
  for (const auto& [term, meaning] : terms) {
    lines += "  " + term;
    lines += term.size() + 4 > indent ? "\n" + std::string(indent, ' ')
                                      : std::string(indent - term.size() - 2, ' ');
    lines += wrapped(meaning, indent, indent, width) + "\n";
  }
  return lines;
}

std::string first_sentence(const std::string& text) {
  const std::size_t end = text.find(". ");
  return end == std::string::npos ? text : text.substr(0, end + 1);
}

// error.hpp explains the codes at length.
const Terms& exit_codes() {
  static const Terms codes = [] {
    Terms terms;
    for (const auto& [code, meaning] : std::initializer_list<std::pair<ExitCode, const char*>>{
             {ExitCode::Ok, "The run is complete."},
             {ExitCode::UserException, "Another error; the message names it."},
             {ExitCode::Settings, "A setting, an argument or the environment is wrong."},
             {ExitCode::Data, "A data file is missing or corrupt."},
             {ExitCode::Mismatch,
              "Ranks disagree, a checkpoint is of another model, or training diverged."},
             {ExitCode::CannotWrite, "Output cannot be written."},
             {ExitCode::CannotRead, "A checkpoint cannot be read."},
             {ExitCode::SavedRequeue, "Stopped on request and saved: start the run again."},
             {ExitCode::PeerLost, "Another rank vanished."}}) {
      terms.emplace_back(std::to_string(static_cast<int>(code)), meaning);
    }
    return terms;
  }();
  return codes;
}

SettingRows rows_of_section(const SettingRows& rows, const std::string& section) {
  SettingRows found;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(found),
               [&](const SettingRow& row) { return detail::section_of(row.key) == section; });
  return found;
}

// The section's own line, or else its first keys.
std::string section_line(const SettingRows& rows) {
  constexpr std::size_t kFirstKeys = 5;
  if (!rows.front().section_doc.empty()) {
    return rows.front().section_doc;
  }
  std::vector<std::string> keys;
  for (const SettingRow& row : rows) {
    keys.push_back(keys.size() < kFirstKeys ? row.key.substr(row.key.find('.') + 1) : "...");
    if (keys.size() > kFirstKeys) {
      break;
    }
  }
  return detail::join(keys, ", ");
}

std::string details(const SettingRow& row, std::size_t width) {
  constexpr std::size_t kIndent = 6;
  const std::string unit = row.field.unit.empty() ? "" : concat(" (", row.field.unit, ")");
  const std::string term = concat("  ", row.key, "=", row.text());
  return concat(columns_of(term) > width ? "  " + wrapped(term, 2, kIndent, width) : term, "\n",
                std::string(kIndent, ' '), wrapped(row.field.doc, kIndent, kIndent, width), "\n",
                std::string(kIndent, ' '),
                wrapped(concat("Allowed: ", row.allowed(), unit), kIndent, kIndent, width), "\n");
}

std::vector<std::string> keys_of(const SettingRows& rows) {
  std::vector<std::string> keys;
  for (const SettingRow& row : rows) {
    keys.push_back(row.key);
  }
  return keys;
}

[[noreturn]] void fail_unknown_topic(const std::string& topic, const SettingRows& rows) {
  std::vector<std::string> near;
  for (const std::string& key : keys_of(rows)) {  // a key without its section
    if (key.substr(key.rfind('.') + 1) == topic) {
      near.push_back(key);
    }
  }
  std::vector<std::string> names = detail::sections_of(rows);
  const std::string sections = detail::join(names, ", ");
  for (const std::string& key : keys_of(rows)) {
    names.push_back(key);
  }
  names.emplace_back("all");
  const std::string similar = detail::nearest(topic, names);
  if (near.empty() && !similar.empty()) {
    near.push_back(similar);
  }
  throw SettingsError(
      concat("--help ", topic.substr(0, 120), ": there is no such section or setting; fix: ",
             near.empty() ? "" : concat("did you mean ", detail::join(near, " or "), "? "),
             "Sections: ", sections, "; all lists every setting"));
}

SettingRows rows_of_topic(const std::string& topic, const SettingRows& rows) {
  const auto select = [&](auto&& accepts) {
    SettingRows found;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(found), accepts);
    return found;
  };
  if (topic == "all") {
    return rows;
  }
  SettingRows found = select([&](const SettingRow& row) { return row.key == topic; });
  for (const std::string& prefix : {topic + ".", topic}) {
    if (found.empty()) {
      found = select([&](const SettingRow& row) { return row.key.starts_with(prefix); });
    }
  }
  if (found.empty()) {
    fail_unknown_topic(topic, rows);
  }
  return found;
}

}  // namespace

std::vector<std::string> detail::sections_of(const SettingRows& rows) {
  std::vector<std::string> sections;
  for (const SettingRow& row : rows) {
    if (sections.empty() || sections.back() != section_of(row.key)) {
      sections.push_back(section_of(row.key));
    }
  }
  return sections;
}

std::string help_page(const std::string& program, const SettingRows& defaults, std::size_t width) {
  Terms sections;
  for (const std::string& section : detail::sections_of(defaults)) {
    sections.emplace_back(section, section_line(rows_of_section(defaults, section)));
  }
  Terms common;
  for (const SettingRow& row : defaults) {
    if (row.field.common) {
      const std::string choices = detail::join(row.field.choices, ", ");
      common.emplace_back(
          row.key + "=" + row.text(),
          first_sentence(row.field.doc) + (choices.empty() ? "" : concat(" (", choices, ")")));
    }
  }
  const std::string usage =
      wrapped(concat("usage: ", program, " [--config FILE.yaml] [key=value ...]"), 0, 7, width);
  return concat(usage, "\n\nOptions\n", two_columns(command_line_options(), width),
                "\nSections of settings (--help ", sections.front().first, ")\n",
                two_columns(sections, width), "  ",
                wrapped("Settings that the program does not use are refused, at the latest in its "
                        "second step.",
                        2, 2, width),
                "\n\nMost used settings, with their defaults\n", two_columns(common, width),
                "\nExit codes\n", two_columns(exit_codes(), width));
}

std::string help_topic(const std::string& topic, const SettingRows& defaults, std::size_t width) {
  std::string text, section;
  for (const SettingRow& row : rows_of_topic(topic, defaults)) {
    if (detail::section_of(row.key) != section) {
      const std::string title = detail::section_of(row.key);
      text += text.empty() ? "" : "\n";
      text += wrapped(row.section_doc.empty() ? title : concat(title, ": ", row.section_doc), 0, 2,
                      width) +
              "\n";
      section = title;
    }
    text += details(row, width);
  }
  return text;
}

}  // namespace ddp
