// SPDX-License-Identifier: Apache-2.0
#include "export/tree_spec.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "core/control/wire/bounded_json.hpp"
#include "ddp/core/error.hpp"
#include "export/json_access.hpp"

namespace ddp::detail {
namespace {

using Json = nlohmann::json;
using TreeKind = TreeSpec::Kind;
using NamedtupleFields = std::map<std::string, std::vector<std::string>>;

std::vector<std::string> texts(const Json& list) {
  std::vector<std::string> result;
  for (const auto& item : list) {
    result.push_back(item.is_string() ? item.get<std::string>() : item.dump());
  }
  return result;
}

// The names of a container's children: of a dict its keys, of a dataclass its fields that are not
// None. Empty for a sequence.
std::vector<std::string> names_of_children(const std::string& type, const Json& context,
                                           const NamedtupleFields& namedtuple_fields) {
  if (type == "collections.defaultdict") {
    return texts(context.at("dict_context"));
  }
  const auto& text = context.get_ref<const std::string&>();
  if (type == "collections.namedtuple") {
    const auto found = namedtuple_fields.find(text);
    if (found == namedtuple_fields.end()) {
      throw DataError("the fields of the namedtuple " + printable(text) + " are missing");
    }
    return found->second;
  }
  const auto names = parse_bounded_json<Json>(text, kMaxJsonDepth);
  const bool is_dataclass = names.is_array() && names.size() == 2 && names[0].is_array();
  if (names.is_array()) {
    return texts(is_dataclass ? names[0] : names);
  }
  throw DataError(concat("the container ", printable(type), " has the unknown context ",
                         printable(text.substr(0, 80))));
}

TreeSpec read_node(const Json& json, const NamedtupleFields& namedtuple_fields) {
  TreeSpec spec;
  if (json.at("type").is_null()) {
    return spec;
  }
  for (const auto& child : json.at("children_spec")) {
    spec.children.push_back(read_node(child, namedtuple_fields));
  }
  const auto type = json.at("type").get<std::string>();
  if (type == "builtins.tuple") {
    spec.kind = TreeKind::Tuple;
  } else if (type == "builtins.list" || type == "collections.deque") {
    spec.kind = TreeKind::List;
  } else {
    spec.kind = TreeKind::Dict;
    spec.keys = names_of_children(type, json.at("context"), namedtuple_fields);
    if (spec.keys.size() != spec.children.size()) {
      throw DataError(concat("the container ", printable(type), " has ", spec.children.size(),
                             " values for ", spec.keys.size(), " names"));
    }
  }
  return spec;
}

c10::IValue build(const TreeSpec& spec, std::span<const c10::IValue>& leaves) {
  if (spec.kind == TreeKind::Leaf) {
    const auto leaf = leaves.front();
    leaves = leaves.subspan(1);
    return leaf;
  }
  std::vector<c10::IValue> values;
  for (const auto& child : spec.children) {
    values.push_back(build(child, leaves));
  }
  if (spec.kind == TreeKind::Tuple) {
    return c10::ivalue::Tuple::create(std::move(values));
  }
  if (spec.kind == TreeKind::List) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (auto& value : values) {
      list.push_back(std::move(value));
    }
    return list;
  }
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (std::size_t i = 0; i < values.size(); ++i) {
    dict.insert(spec.keys[i], values[i]);
  }
  return dict;
}

void flatten_sequence(const TreeSpec& spec, std::span<const c10::IValue> values,
                      const std::string& what, std::vector<c10::IValue>& leaves) {
  if (values.size() != spec.children.size()) {
    throw SettingsError(concat(what, " has ", values.size(), " elements, and ",
                               spec.children.size(), " at the export; fix: pass as many"));
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    flatten(spec.children[i], values[i], concat(what, '[', i, ']'), leaves);
  }
}

void flatten_dict(const TreeSpec& spec, const c10::impl::GenericDict& dict, const std::string& what,
                  std::vector<c10::IValue>& leaves) {
  for (const auto& entry : dict) {
    if (!entry.key().isString()) {
      throw SettingsError(concat(what, " has a key of the type ", entry.key().tagKind(),
                                 "; fix: keys of any type are texts here, so 1 is \"1\""));
    }
    const auto& key = entry.key().toStringRef();
    if (std::find(spec.keys.begin(), spec.keys.end(), key) == spec.keys.end()) {
      throw SettingsError(what + " has a key that it lacked at the export: " + printable(key));
    }
  }
  for (std::size_t i = 0; i < spec.keys.size(); ++i) {
    const auto found = dict.find(spec.keys[i]);
    if (found == dict.end()) {
      throw SettingsError(what + " lacks the key '" + spec.keys[i] +
                          "', which it had at the export");
    }
    flatten(spec.children[i], found->value(), concat(what, "['", spec.keys[i], "']"), leaves);
  }
}

}  // namespace

std::size_t TreeSpec::num_leaves() const {
  std::size_t count = kind == TreeKind::Leaf ? 1 : 0;
  for (const auto& child : children) {
    count += child.num_leaves();
  }
  return count;
}

TreeSpec read_tree_spec(const std::string& text, const NamedtupleFields& namedtuple_fields) {
  const auto json = parse_bounded_json<Json>(text, kMaxJsonDepth);
  if (!json.is_array() || json.size() != 2 || json[0] != 1) {
    throw DataError("a container's description has another protocol than 1");
  }
  return read_node(json[1], namedtuple_fields);
}

c10::IValue unflatten(const TreeSpec& spec, const std::vector<c10::IValue>& leaves) {
  std::span<const c10::IValue> rest(leaves);
  return build(spec, rest);
}

void flatten(const TreeSpec& spec, const c10::IValue& value, const std::string& what,
             std::vector<c10::IValue>& leaves) {
  if (spec.kind == TreeKind::Leaf) {
    leaves.push_back(value);
  } else if (spec.kind == TreeKind::Dict && value.isGenericDict()) {
    flatten_dict(spec, value.toGenericDict(), what, leaves);
  } else if (spec.kind != TreeKind::Dict && value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    flatten_sequence(spec, {elements.begin(), elements.end()}, what, leaves);
  } else if (spec.kind != TreeKind::Dict && value.isList()) {
    const auto elements = value.toListRef();
    flatten_sequence(spec, {elements.begin(), elements.end()}, what, leaves);
  } else {
    constexpr const char* kNames[] = {"a value", "a list", "a tuple", "a dict"};
    throw SettingsError(concat(what, " was ", kNames[static_cast<int>(spec.kind)],
                               " at the export, not a ", value.tagKind()));
  }
}

}  // namespace ddp::detail
