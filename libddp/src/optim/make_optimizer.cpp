// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include "ddp/core/error.hpp"
#include "optim/flat_optimizer.hpp"
#include "optim/list_optimizer.hpp"

namespace ddp {

AnyOptimizer make_optimizer(const NamedParameters& parameters, const OptimizerOptions& options) {
  const auto settings = detail::settings_of_parameters(parameters, options);
  const std::string reason = detail::reason_against_flat(settings, options);
  const bool on_cuda = !settings.empty() && settings.front().parameter.tensor.device().is_cuda();
  switch (options.implementation) {
    case OptimizerImplementation::List:
      break;
    case OptimizerImplementation::Flat:
      if (!reason.empty()) {
        throw SettingsError("optimizer.implementation=flat cannot be had: " + reason +
                            "; set it to auto or list");
      }
      return AnyOptimizer(std::make_unique<detail::FlatOptimizer>(settings, options));
    case OptimizerImplementation::Auto:
      if (on_cuda && reason.empty()) {
        return AnyOptimizer(std::make_unique<detail::FlatOptimizer>(settings, options));
      }
  }
  return AnyOptimizer(std::make_unique<detail::ListOptimizer>(settings, options));
}

}  // namespace ddp
