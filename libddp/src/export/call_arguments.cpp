// SPDX-License-Identifier: Apache-2.0
#include "export/call_arguments.hpp"

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"

namespace ddp::detail {
namespace {

bool is_same(const c10::IValue& a, const c10::IValue& b) {
  const bool are_numbers = a.isScalar() && b.isScalar();
  return are_numbers ? a.toScalar().to<double>() == b.toScalar().to<double>()
                     : a.tagKind() == b.tagKind() && (a.isNone() || (a.isString() && a == b));
}

}  // namespace

std::vector<ForwardArgument> forward_arguments(const ExportedProgram& program) {
  std::vector<ForwardArgument> arguments;
  const auto& positional = program.in_spec.children[0];
  const auto& keywords = program.in_spec.children[1];
  for (std::size_t i = 0; i < positional.children.size(); ++i) {
    arguments.push_back(
        {i < program.argument_names.size() ? program.argument_names[i] : concat("argument ", i),
         &positional.children[i]});
  }
  for (std::size_t i = 0; i < keywords.children.size(); ++i) {
    arguments.push_back({keywords.keys[i], &keywords.children[i]});
  }
  return arguments;
}

CallArguments::CallArguments(const ExportedProgram& program) {
  std::vector<const InputSpec*> leaves;
  for (const auto& input : program.inputs) {
    if (input.is_argument()) {
      leaves.push_back(&input);
    }
  }
  auto next = leaves.begin();
  for (auto& argument : forward_arguments(program)) {
    const auto end = next + static_cast<std::ptrdiff_t>(argument.spec->num_leaves());
    parameters_.push_back({std::move(argument), {next, end}});
    next = end;
  }
}

bool CallArguments::Parameter::is_fixed() const {
  return std::all_of(leaves.begin(), leaves.end(),
                     [](const InputSpec* leaf) { return leaf->kind == InputKind::Constant; });
}

void CallArguments::Parameter::check_constants(const c10::IValue* values) const {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i]->kind == InputKind::Constant && !is_same(values[i], leaves[i]->constant)) {
      throw SettingsError(concat("argument ", printable(name), " was ", leaves[i]->constant,
                                 " at the export, which fixed it",
                                 "; fix: pass this value, or export with another"));
    }
  }
}

std::string CallArguments::names() const {
  std::string names;
  for (const auto& parameter : parameters_) {
    names += concat(names.empty() ? "" : ", ", printable(parameter.name));
  }
  return names.empty() ? "none" : names;
}

void CallArguments::check_keywords(std::size_t num_positional,
                                   const std::map<std::string, c10::IValue>& keywords) const {
  for (const auto& keyword : keywords) {
    const auto& name = keyword.first;
    const auto found =
        std::find_if(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& parameter) { return parameter.name == name; });
    if (found == parameters_.end()) {
      throw SettingsError(
          concat("the exported module has no argument ", printable(name), "; it has: ", names()));
    }
    if (static_cast<std::size_t>(found - parameters_.begin()) < num_positional) {
      throw SettingsError(
          concat("argument ", printable(name), " is given by position and by name"));
    }
  }
}

std::vector<c10::IValue> CallArguments::flat(
    const std::vector<c10::IValue>& positional,
    const std::map<std::string, c10::IValue>& keywords) const {
  if (positional.size() > parameters_.size()) {
    throw SettingsError(concat("the exported module takes ", parameters_.size(), " arguments (",
                               names(), "), not ", positional.size()));
  }
  check_keywords(positional.size(), keywords);
  std::vector<c10::IValue> values;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto first = values.size();
    const auto keyword = keywords.find(parameter.name);
    if (i < positional.size() || keyword != keywords.end()) {
      flatten(*parameter.spec, i < positional.size() ? positional[i] : keyword->second,
              "argument " + printable(parameter.name), values);
      parameter.check_constants(values.data() + first);
    } else if (parameter.is_fixed()) {
      for (const auto* leaf : parameter.leaves) {
        values.push_back(leaf->constant);
      }
    } else {
      throw MissingArgumentError(concat("the call lacks the argument ", printable(parameter.name),
                                        " of the exported module; it has: ", names()));
    }
  }
  return values;
}

}  // namespace ddp::detail
