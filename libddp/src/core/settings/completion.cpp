// SPDX-License-Identifier: Apache-2.0
#include "core/settings/completion.hpp"

#include <cctype>
#include <map>
#include <vector>

#include "core/settings/command_line.hpp"
#include "core/settings/settings_help.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

// @NAME@ is the program, the other words in @ are replaced by lists.
constexpr const char* kBash =
    R"(# bash completion for @NAME@. Load it in a shell, or store it for all shells:
#   source <(@NAME@ --completion bash)
#   @NAME@ --completion bash >~/.local/share/bash-completion/completions/@NAME@
_ddp_complete_@NAME@() {
  # COMP_WORDS is not used: bash also splits words at "=".
  local line=${COMP_LINE:0:COMP_POINT}
  local word=${line##*[[:space:]]}
  local before=${line%"$word"}
  before=${before%"${before##*[![:space:]]}"}
  local key=${before##*[[:space:]]} value=$word prefix=""
  if [[ $word == *=* ]]; then
    key=${word%%=*} value=${word#*=}
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=$key=
  elif [[ $key != --config && $key != --help && $key != -h && $key != --completion ]]; then
    key=""
  fi
  local choices="" files="" suffix=""
  case $key in
    '')
      case $word in
        -*) choices='@OPTIONS@' ;;
        *.*) choices='@KEYS@' suffix='=' ;;
        *) choices='@SECTIONS@' suffix=. ;;
      esac
      ;;
    --config) files=yes ;;
    --completion) choices='bash zsh' ;;
    --help | -h)
      choices='all @SECTIONS@'
      [[ $word != *.* ]] || choices='@KEYS@'
      ;;
@VALUES@  esac
  COMPREPLY=()
  if [[ $files ]]; then
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -P "$prefix" -f -- "$value")
  else
    [[ -z $suffix ]] || compopt -o nospace 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -P "$prefix" -S "$suffix" -W "$choices" -- "$value")
  fi
}
complete -F _ddp_complete_@NAME@ @NAME@
)";

constexpr const char* kZsh = R"(#compdef @NAME@
# zsh completion for @NAME@. Load it in a shell after compinit, or store it in a folder of $fpath:
#   source <(@NAME@ --completion zsh)
#   @NAME@ --completion zsh >~/.zfunc/_@NAME@
_@NAME@() {
  local key=$words[CURRENT-1] choices="" files=""
  if compset -P 1 '*='; then
    key=${IPREFIX%=}
  elif [[ $key != --config && $key != --help && $key != -h && $key != --completion ]]; then
    key=""
  fi
  local -a keys=(
@KEYS@  )
  local -a sections=(
@SECTIONS@  )
  local -a options=(
@OPTIONS@  )
  case $key in
    '')
      case $PREFIX in
        -*) _describe -t options option options ;;
        *.*) _describe -t settings setting keys -S = ;;
        *) _describe -t sections section sections -S . ;;
      esac
      return
      ;;
    --config) files=yes ;;
    --completion) choices='bash zsh' ;;
    --help | -h)
      if [[ $PREFIX == *.* ]]; then
        _describe -t settings setting keys
      else
        sections+=('all:every setting')
        _describe -t sections section sections
      fi
      return
      ;;
@VALUES@  esac
  if [[ -n $files ]]; then
    _files
  else
    compadd -- ${=choices}
  fi
}
if [[ $funcstack[1] == _@NAME@ ]]; then
  _@NAME@ "$@"
else
  compdef _@NAME@ @NAME@
fi
)";

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

// A name that is one word for the shell.
std::string shell_name(std::string name) {
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '-' && c != '.') {
      c = '_';
    }
  }
  return name;
}

// Arms of a shell's `case`: what follows "key=". Numbers have no arm.
std::string value_cases(const SettingRows& rows) {
  std::map<std::string, std::vector<std::string>> keys_by_action;
  for (const SettingRow& row : rows) {
    const std::string choices =
        row.type == SettingRow::Type::Bool ? "true false" : detail::join(row.field.choices, " ");
    if (!choices.empty()) {
      keys_by_action["choices='" + choices + "'"].push_back(row.key);
    } else if (row.type == SettingRow::Type::Text) {  // most texts are paths
      keys_by_action["files=yes"].push_back(row.key);
    }
  }
  std::string arms;
  for (const auto& [action, keys] : keys_by_action) {
    arms += concat("    ", detail::join(keys, " | "), ") ", action, " ;;\n");
  }
  return arms;
}

// "--config" of "--config FILE".
std::string option_name(const std::string& option) {
  return option.substr(0, option.find(' '));
}

std::string bash_script(const SettingRows& rows) {
  std::vector<std::string> keys, options;
  for (const SettingRow& row : rows) {
    keys.push_back(row.key);
  }
  for (const auto& [option, meaning] : command_line_options()) {
    options.push_back(option_name(option));
  }
  std::string script = replaced(kBash, "@OPTIONS@", detail::join(options, " "));
  script = replaced(script, "@SECTIONS@", detail::join(detail::sections_of(rows), " "));
  return replaced(script, "@KEYS@", detail::join(keys, " "));
}

// An item of zsh's _describe.
std::string described(const std::string& word, const std::string& meaning) {
  return concat("    '", word, ":", replaced(meaning, "'", "'\\''"), "'\n");
}

std::string zsh_script(const SettingRows& rows) {
  std::string keys, sections, options;
  std::string section;
  for (const SettingRow& row : rows) {
    keys += described(row.key, row.field.doc);
    if (detail::section_of(row.key) != section) {
      section = detail::section_of(row.key);
      sections += described(section, row.section_doc);
    }
  }
  for (const auto& [option, meaning] : command_line_options()) {
    options += described(option_name(option), meaning);
  }
  std::string script = replaced(kZsh, "@OPTIONS@", options);
  return replaced(replaced(script, "@SECTIONS@", sections), "@KEYS@", keys);
}

}  // namespace

std::string completion_script(const std::string& shell, const std::string& program,
                              const SettingRows& defaults) {
  const std::string script = shell == "zsh" ? zsh_script(defaults) : bash_script(defaults);
  return replaced(replaced(script, "@VALUES@", value_cases(defaults)), "@NAME@",
                  shell_name(program));
}

}  // namespace ddp
