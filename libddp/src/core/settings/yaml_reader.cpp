// SPDX-License-Identifier: Apache-2.0
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <sstream>
#include <vector>

#include "core/settings/settings_reader.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using UserValue = Settings::UserValue;

// Handles parser events without yaml-cpp's node graph. Input that is too deep or shared is refused
// during parsing, before it costs stack or memory.
class SettingsHandler final : public YAML::EventHandler {
 public:
  SettingsHandler(std::map<std::string, UserValue>& values, const std::string& name)
      : values_(values), name_(name) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) {
      fail(mark, "a second document begins; fix: keep one document per file");
    }
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    refuse_anchor(mark, anchor);
    if (levels_.empty()) {
      return;  // an empty file
    }
    UserValue null;
    null.is_null = true;
    null.items = {""};
    add(mark, std::move(null));
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    fail(mark, "aliases (*name) are not supported; fix: write the value itself");
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    refuse_anchor(mark, anchor);
    if (tag != "?" && tag != "!" && !tag.empty()) {
      fail(mark, concat("the tag ", tag, " is not supported; fix: remove it"));
    }
    UserValue scalar;
    scalar.is_quoted = tag == "!";
    scalar.items = {value};
    add(mark, std::move(scalar));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    refuse_anchor(mark, anchor);
    if (levels_.empty() || levels_.back().is_list) {
      fail(mark,
           "a list is given where a section or value is expected; fix: write section: and "
           "key: value lines; lists have plain values only");
    }
    require_key(mark);
    levels_.push_back({true, "", levels_.back().key, {}, levels_.back().line});
  }
  void OnSequenceEnd() override {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    UserValue list;
    list.is_list = true;
    list.items = std::move(level.items);
    add({}, std::move(list));
  }

  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    refuse_anchor(mark, anchor);
    std::string prefix;
    if (!levels_.empty()) {
      if (levels_.back().is_list) {
        fail(mark, "a section is given inside a list; fix: lists have plain values only");
      }
      require_key(mark);
      const std::string name = levels_.back().prefix + levels_.back().key;
      begin(name, concat(name_, ":", levels_.back().line));
      prefix = name + ".";
    }
    if (levels_.size() >= kMaxYamlDepth) {
      fail(mark, concat("nested deeper than ", kMaxYamlDepth, " levels; fix: use fewer levels"));
    }
    levels_.push_back({false, prefix, "", {}, 0});
  }
  void OnMapEnd() override {
    levels_.pop_back();
    if (!levels_.empty()) {
      levels_.back().key.clear();
    }
  }

 private:
  struct Level {
    bool is_list = false;
    std::string prefix;  // for the keys of this section
    std::string key;     // key whose value comes next; empty if a key comes next
    std::vector<std::string> items;
    int line = 0;  // line of the key
  };

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& why) const {
    throw SettingsError(concat(name_, ":", mark.line + 1, ": ", why));
  }

  void refuse_anchor(const YAML::Mark& mark, YAML::anchor_t anchor) const {
    if (anchor != 0) {
      fail(mark, "anchors (&name) are not supported; fix: remove it");
    }
  }

  void require_key(const YAML::Mark& mark) const {
    if (levels_.back().key.empty()) {
      fail(mark, "a key must be a plain string; fix: write key: value");
    }
  }

  // A key, a list item, or the value of the current key.
  void add(const YAML::Mark& mark, UserValue value) {
    if (levels_.empty()) {
      fail(mark, "the file must have sections; fix: write section: and key: value lines");
    }
    Level& level = levels_.back();
    if (level.is_list) {
      level.items.push_back(value.items.front());
      return;
    }
    if (level.key.empty()) {
      level.key = value.items.front();
      level.line = mark.line + 1;
      require_key(mark);
      return;
    }
    const std::string key = level.prefix + level.key;
    value.origin = concat(name_, ":", level.line);
    begin(key, value.origin);
    values_.emplace(key, std::move(value));
    level.key.clear();
  }

  // Starts a key or section, which may occur once per file.
  void begin(const std::string& key, const std::string& origin) {
    const auto [found, is_new] = origins_.emplace(key, origin);
    if (!is_new) {
      throw SettingsError(concat(origin, ": ", key, " is set a second time, first at ",
                                 found->second, "; fix: keep one of them"));
    }
  }

  std::map<std::string, UserValue>& values_;
  std::map<std::string, std::string> origins_;  // keys and sections
  const std::string& name_;
  std::vector<Level> levels_;
  int documents_ = 0;
};

}  // namespace

std::map<std::string, UserValue> read_yaml(const std::string& text, const std::string& name) {
  if (text.size() > kMaxYamlBytes) {
    throw SettingsError(concat(name, ": larger than 1 MiB; fix: give a settings file"));
  }
  std::map<std::string, UserValue> values;
  SettingsHandler handler(values, name);
  std::istringstream in(text);
  try {
    YAML::Parser parser(in);
    while (parser.HandleNextDocument(handler)) {
    }
  } catch (const YAML::Exception& error) {
    throw SettingsError(
        concat(name, ":", error.mark.line + 1, ": cannot be read as YAML: ", error.msg));
  }
  return values;
}

}  // namespace ddp::detail
