// SPDX-License-Identifier: Apache-2.0
#include "optim/parameter_settings.hpp"

#include <fnmatch.h>

#include <map>
#include <set>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// The group of `name`: the first with a matching pattern, or nullptr.
const ParameterGroup* find_group(const std::string& name, const OptimizerOptions& options) {
  for (const ParameterGroup& group : options.groups) {
    for (const std::string& pattern : group.patterns) {
      if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0) {
        return &group;
      }
    }
  }
  return nullptr;
}

void check_parameter(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      !at::isFloatingType(tensor.scalar_type())) {
    throw SettingsError(concat("make_optimizer: parameter ", parameter.name, " is ",
                               tensor.defined() ? tensor.toString() : "undefined",
                               "; optimizers take dense floating-point tensors"));
  }
}

void check_groups_used(const std::set<const ParameterGroup*>& used,
                       const OptimizerOptions& options) {
  for (const ParameterGroup& group : options.groups) {
    if (!used.contains(&group)) {
      throw SettingsError(concat("optimizer.groups: \"", group.patterns.front(),
                                 "\" takes no parameter: no name matches, or earlier groups took "
                                 "those that do"));
    }
  }
}

void check_same_group(const std::string& first, const ParameterGroup* first_group,
                      const std::string& second, const ParameterGroup* second_group) {
  if (first_group != second_group) {
    throw SettingsError(concat("optimizer.groups: ", first, " and ", second,
                               " are one shared parameter, but belong to different groups; fix: "
                               "give one group patterns for both names"));
  }
}

}  // namespace

std::vector<ParameterSettings> settings_of_parameters(const NamedParameters& parameters,
                                                      const OptimizerOptions& options) {
  validate(options);
  std::vector<ParameterSettings> settings;
  std::set<std::string> names;
  struct First {
    size_t index;  // in `settings`
    const ParameterGroup* group;
  };
  std::map<const c10::TensorImpl*, First> tensors;
  std::set<const ParameterGroup*> used_groups;
  for (const NamedParameter& parameter : parameters) {
    check_parameter(parameter);
    if (!names.insert(parameter.name).second) {
      throw SettingsError(concat("make_optimizer: two parameters are named ", parameter.name));
    }
    const ParameterGroup* group = find_group(parameter.name, options);
    used_groups.insert(group);
    const auto [first, is_new] =
        tensors.try_emplace(parameter.tensor.unsafeGetTensorImpl(), First{settings.size(), group});
    if (!is_new) {  // a shared weight is updated once, under its first name
      ParameterSettings& shared = settings[first->second.index];
      check_same_group(shared.parameter.name, first->second.group, parameter.name, group);
      shared.other_names.push_back(parameter.name);
      continue;
    }
    double weight_decay = options.weight_decay;
    if (!options.decay_norm_and_bias && parameter.tensor.dim() <= 1) {
      weight_decay = 0.0;
    }
    settings.push_back(
        {.parameter = parameter,
         .lr_scale = group ? group->lr_scale : 1.0,
         .weight_decay = group ? group->weight_decay.value_or(weight_decay) : weight_decay,
         .adapts = options.adapt_norm_and_bias || parameter.tensor.dim() > 1});
  }
  check_groups_used(used_groups, options);
  return settings;
}

}  // namespace ddp::detail
