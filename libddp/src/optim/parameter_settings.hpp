// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/optim/make_optimizer.hpp"

namespace ddp::detail {

/// Throws SettingsError naming the first setting that is out of range or contradicts another.
void validate(const OptimizerOptions& options);

/// A parameter and the settings of its group.
struct ParameterSettings {
  NamedParameter parameter;
  double lr_scale = 1.0;
  double weight_decay = 0.0;
  bool adapts = true;                         ///< LARS, LAMB: it has a trust ratio
  std::vector<std::string> other_names = {};  ///< of a shared weight
};

/// Checks `options` and assigns every parameter its settings. A shared weight is listed once, under
/// its first name. Throws SettingsError as documented at make_optimizer.
std::vector<ParameterSettings> settings_of_parameters(const NamedParameters& parameters,
                                                      const OptimizerOptions& options);

inline bool is_half(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

}  // namespace ddp::detail
