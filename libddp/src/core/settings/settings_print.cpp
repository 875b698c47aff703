// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>

#include "core/log/lower_case.hpp"
#include "core/settings/setting_row.hpp"
#include "core/settings/settings_reader.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"

namespace ddp {
namespace {

using Type = SettingRow::Type;

bool is_plain_yaml(const std::string& text) {
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '/' || c == '.' || c == '-';
  };
  if (text.empty() || !std::all_of(text.begin(), text.end(), allowed) ||
      std::isalpha(static_cast<unsigned char>(text.front())) == 0) {
    return false;
  }
  const std::string lower = detail::lower_case(text);
  for (const char* word :
       {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf"}) {
    if (lower == word) {
      return false;
    }
  }
  return true;
}

std::string yaml_text(const std::string& text) {
  if (is_plain_yaml(text)) {
    return text;
  }
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (byte < 0x20 || byte == 0x7f) {
      constexpr char kDigits[] = "0123456789abcdef";
      quoted += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string yaml_item(Type type, const std::string& item) {
  if (type == Type::Text || type == Type::TextList) {
    return yaml_text(item);
  }
  return item == "inf" ? ".inf" : item == "-inf" ? "-.inf" : item;
}

std::string yaml_value(const SettingRow& row) {
  if (!row.is_list()) {
    return yaml_item(row.type, row.values.front());
  }
  std::vector<std::string> items;
  for (const std::string& item : row.values) {
    items.push_back(yaml_item(row.type, item));
  }
  return concat("[", detail::join(items, ", "), "]");
}

// Writes the rows whose keys begin with `prefix`, in order. A nested section is written at its
// first row.
void write_yaml(const SettingRows& rows, const std::string& prefix, ddp::detail::TextStream& out) {
  const std::string indent(
      2 * static_cast<std::size_t>(std::count(prefix.begin(), prefix.end(), '.')), ' ');
  std::vector<std::string> done;
  for (const SettingRow& row : rows) {
    if (row.key.compare(0, prefix.size(), prefix) != 0) {
      continue;
    }
    const std::string rest = row.key.substr(prefix.size());
    const std::size_t dot = rest.find('.');
    if (dot == std::string::npos) {
      out << indent << yaml_text(rest) << ": " << yaml_value(row) << "\n";
      continue;
    }
    const std::string name = rest.substr(0, dot);
    if (std::find(done.begin(), done.end(), name) == done.end()) {
      done.push_back(name);
      out << indent << yaml_text(name) << ":\n";
      write_yaml(rows, prefix + name + ".", out);
    }
  }
}

std::string with_unit(const SettingRow& row) {
  if (row.text().empty()) {
    return "(empty)";
  }
  return row.field.unit.empty() ? row.text() : row.text() + " " + row.field.unit;
}

// One line per key, each after `mark(row)`.
template <typename F>
std::string aligned_lines(const SettingRows& rows, F&& mark) {
  std::size_t width = 0;
  for (const SettingRow& row : rows) {
    width = std::max(width, row.key.size());
  }
  ddp::detail::TextStream out;
  for (const SettingRow& row : rows) {
    out << mark(row) << row.key << std::string(width + 2 - row.key.size(), ' ') << with_unit(row)
        << "\n";
  }
  return out.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::string escape_markdown(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    escaped += c == '|' ? "\\|" : c == '<' ? "&lt;" : std::string(1, c);
  }
  return escaped;
}

}  // namespace

std::string settings_yaml(const SettingRows& rows) {
  ddp::detail::TextStream out;
  write_yaml(rows, "", out);
  std::string text = out.str();
  if (text.size() > detail::kMaxYamlBytes) {
    throw SettingsError(
        "the settings are larger than 1 MiB as YAML, so they could not be read again; fix: give "
        "fewer or shorter values");
  }
  return text;
}

SettingRows changed_settings(const SettingRows& rows, const SettingRows& defaults) {
  std::map<std::string, std::string> default_text;
  for (const SettingRow& row : defaults) {
    default_text[row.key] = row.text();
  }
  SettingRows changed;
  for (const SettingRow& row : rows) {
    const auto found = default_text.find(row.key);
    if (found == default_text.end() || found->second != row.text()) {
      changed.push_back(row);
    }
  }
  return changed;
}

std::string settings_table(const SettingRows& rows, const SettingRows& defaults) {
  std::set<std::string> changed;
  for (const SettingRow& row : changed_settings(rows, defaults)) {
    changed.insert(row.key);
  }
  return aligned_lines(
      rows, [&](const SettingRow& row) { return changed.contains(row.key) ? "* " : "  "; });
}

std::string settings_lines(const SettingRows& rows) {
  return aligned_lines(rows, [](const SettingRow&) { return "  "; });
}

std::string settings_canonical(const SettingRows& rows) {
  std::vector<std::string> lines;
  for (const SettingRow& row : rows) {
    if (!row.field.may_differ) {
      lines.push_back(row.key + "=" + yaml_value(row));
    }
  }
  std::sort(lines.begin(), lines.end());
  return detail::join(lines, "\n");
}

std::optional<std::pair<std::string, std::string>> first_different_lines(const std::string& text,
                                                                         const std::string& other) {
  const auto left = lines_of(text);
  const auto right = lines_of(other);
  for (std::size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
    const std::string a = i < left.size() ? left[i] : "(nothing)";
    const std::string b = i < right.size() ? right[i] : "(nothing)";
    if (a != b) {
      return std::pair(a, b);
    }
  }
  return std::nullopt;
}

std::string first_difference(const std::string& canonical, const std::string& other) {
  const auto lines = first_different_lines(canonical, other);
  return lines ? concat(lines->first, " here, ", lines->second, " there") : "";
}

std::string settings_markdown(const SettingRows& defaults) {
  ddp::detail::TextStream out;
  std::string section;
  for (const SettingRow& row : defaults) {
    if (detail::section_of(row.key) != section) {
      section = detail::section_of(row.key);
      out << "\n## " << section << "\n\n";
      if (!row.section_doc.empty()) {
        out << escape_markdown(row.section_doc) << "\n\n";
      }
      out << "| key | default | allowed | meaning |\n|---|---|---|---|\n";
    }
    const std::string text = with_unit(row);
    out << "| `" << row.key << "` | " << (row.text().empty() ? text : concat("`", text, "`"))
        << " | " << escape_markdown(row.allowed()) << " | " << escape_markdown(row.field.doc)
        << " |\n";
  }
  return out.str();
}

}  // namespace ddp
