// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include "ddp/core/error.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "optim/flat_optimizer.hpp"
#include "optim/list_optimizer.hpp"
#include "optim/zero_optimizer.hpp"

namespace ddp {
namespace {

using SettingsList = std::vector<detail::ParameterSettings>;

// nullptr where the lists are to do it.
std::unique_ptr<detail::FlatOptimizer> make_flat(const SettingsList& settings,
                                                 const OptimizerOptions& options) {
  if (options.implementation == OptimizerImplementation::List) {
    return nullptr;
  }
  const std::string reason = detail::reason_against_flat(settings, options);
  if (options.implementation == OptimizerImplementation::Flat && !reason.empty()) {
    throw SettingsError("optimizer.implementation=flat cannot be had: " + reason +
                        "; set it to auto or list");
  }
  const bool wanted = options.implementation == OptimizerImplementation::Flat ||
                      options.overlap_backward ||
                      (!settings.empty() && settings.front().parameter.tensor.is_cuda());
  return wanted && reason.empty() ? std::make_unique<detail::FlatOptimizer>(settings, options)
                                  : nullptr;
}

AnyOptimizer make_list(const SettingsList& settings, const OptimizerOptions& options) {
  return AnyOptimizer(std::make_unique<detail::ListOptimizer>(settings, options));
}

[[noreturn]] void refuse(const char* setting, const std::string& reason) {
  throw SettingsError(
      detail::concat("optimizer.", setting, "=true cannot be had: ", reason, "; set it to false"));
}

[[noreturn]] void refuse_overlap(const std::string& reason) {
  refuse("overlap_backward", reason);
}

void check_overlap(const DataParallelModel& model, const SettingsList& settings) {
  if (model.options().find_unused_parameters || model.options().static_graph) {
    refuse_overlap(
        "with ddp.find_unused_parameters or ddp.static_graph the end of backward tells which "
        "parameters were used");
  }
  if (settings.size() > static_cast<size_t>(detail::kFlatMaxGradients)) {
    refuse_overlap(detail::concat("the model has ", settings.size(), " parameters, more than ",
                                  detail::kFlatMaxGradients));
  }
}

[[noreturn]] void refuse_zero(const std::string& reason) {
  refuse("zero1", reason);
}

AnyOptimizer make_zero(DataParallelModel& model, const OptimizerOptions& options) {
  const SettingsList settings = detail::settings_of_parameters(model.named_parameters(), options);
  if (const auto reason = detail::reason_against_zero(settings, options); !reason.empty()) {
    refuse_zero(reason);
  }
  if (options.overlap_backward) {
    check_overlap(model, settings);
  }
  return AnyOptimizer(std::make_unique<detail::ZeroOptimizer>(model, settings, options));
}

}  // namespace

AnyOptimizer make_optimizer(const NamedParameters& parameters, const OptimizerOptions& options) {
  options.taken.set();
  const SettingsList settings = detail::settings_of_parameters(parameters, options);
  const std::string reason = "the optimizer was given parameters, not a DistributedDataParallel";
  if (options.zero1) {
    refuse_zero(reason);
  }
  if (options.overlap_backward) {
    refuse_overlap(reason);
  }
  auto flat = make_flat(settings, options);
  return flat ? AnyOptimizer(std::move(flat)) : make_list(settings, options);
}

AnyOptimizer make_optimizer(DataParallelModel& model, const OptimizerOptions& options) {
  options.taken.set();
  if (options.zero1) {
    return make_zero(model, options);
  }
  if (!options.overlap_backward) {
    return make_optimizer(model.named_parameters(), options);
  }
  const SettingsList settings = detail::settings_of_parameters(model.named_parameters(), options);
  auto flat = make_flat(settings, options);
  if (!flat) {
    const std::string reason = detail::reason_against_flat(settings, options);
    refuse_overlap(reason.empty() ? "optimizer.implementation is list" : reason);
  }
  check_overlap(model, settings);
  flat->listen_to(model.reducer());
  return AnyOptimizer(std::move(flat));
}

}  // namespace ddp
