// SPDX-License-Identifier: Apache-2.0
#include "export/call_arguments.hpp"

#include <algorithm>
#include <optional>
#include <span>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// An argument of Python's forward: its name, its containers, and the specs of its leaves.
struct Parameter {
  std::string name;
  const TreeSpec* spec = nullptr;
  std::vector<const InputSpec*> leaves;

  bool is_fixed() const {
    return std::all_of(leaves.begin(), leaves.end(),
                       [](const InputSpec* leaf) { return leaf->kind == InputKind::Constant; });
  }
};

std::vector<Parameter> parameters_of(const ExportedProgram& program) {
  std::vector<const InputSpec*> leaves;
  for (const auto& input : program.inputs) {
    if (input.kind == InputKind::User || input.kind == InputKind::Constant) {
      leaves.push_back(&input);
    }
  }
  const auto& positional = program.in_spec.children[0];
  const auto& keywords = program.in_spec.children[1];
  std::vector<Parameter> parameters;
  std::size_t next = 0;
  const auto add = [&](const TreeSpec& spec, std::string name) {
    const auto count = spec.num_leaves();
    parameters.push_back({std::move(name),
                          &spec,
                          {leaves.begin() + static_cast<std::ptrdiff_t>(next),
                           leaves.begin() + static_cast<std::ptrdiff_t>(next + count)}});
    next += count;
  };
  for (std::size_t i = 0; i < positional.children.size(); ++i) {
    add(positional.children[i],
        i < program.argument_names.size() ? program.argument_names[i] : concat("argument ", i));
  }
  for (std::size_t i = 0; i < keywords.children.size(); ++i) {
    add(keywords.children[i], keywords.keys[i]);
  }
  return parameters;
}

std::string names_of(const std::vector<Parameter>& parameters) {
  std::string names;
  for (const auto& parameter : parameters) {
    names += concat(names.empty() ? "" : ", ", printable(parameter.name));
  }
  return names.empty() ? "none" : names;
}

bool is_same(const c10::IValue& a, const c10::IValue& b) {
  const bool are_numbers = a.isScalar() && b.isScalar();
  return are_numbers ? a.toScalar().to<double>() == b.toScalar().to<double>()
                     : a.tagKind() == b.tagKind() && (a.isNone() || (a.isString() && a == b));
}

void check_constants(const Parameter& parameter, std::span<const c10::IValue> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& leaf = *parameter.leaves[i];
    if (leaf.kind == InputKind::Constant && !is_same(values[i], leaf.constant)) {
      throw SettingsError(concat("argument ", printable(parameter.name), " was ", leaf.constant,
                                 " at the export, which fixed it",
                                 "; fix: pass this value, or export with another"));
    }
  }
}

}  // namespace

std::vector<c10::IValue> flat_arguments(const ExportedProgram& program,
                                        const std::vector<c10::IValue>& positional,
                                        const std::map<std::string, c10::IValue>& keywords) {
  const auto parameters = parameters_of(program);
  if (positional.size() > parameters.size()) {
    throw SettingsError(concat("the exported module takes ", parameters.size(), " arguments (",
                               names_of(parameters), "), not ", positional.size()));
  }
  for (const auto& keyword : keywords) {
    const auto& name = keyword.first;
    const auto found =
        std::find_if(parameters.begin(), parameters.end(),
                     [&](const Parameter& parameter) { return parameter.name == name; });
    if (found == parameters.end()) {
      throw SettingsError(concat("the exported module has no argument ", printable(name),
                                 "; it has: ", names_of(parameters)));
    }
    if (static_cast<std::size_t>(found - parameters.begin()) < positional.size()) {
      throw SettingsError(
          concat("argument ", printable(name), " is given by position and by name"));
    }
  }
  std::vector<c10::IValue> values;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    const auto first = values.size();
    const auto keyword = keywords.find(parameter.name);
    if (i < positional.size() || keyword != keywords.end()) {
      flatten(*parameter.spec, i < positional.size() ? positional[i] : keyword->second,
              "argument " + printable(parameter.name), values);
      check_constants(parameter, std::span(values).subspan(first));
    } else if (parameter.is_fixed()) {
      for (const auto* leaf : parameter.leaves) {
        values.push_back(leaf->constant);
      }
    } else {
      throw SettingsError(
          concat("the exported module lacks the argument ", printable(parameter.name)));
    }
  }
  return values;
}

}  // namespace ddp::detail
