// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include <map>

#include "ddp/core/error.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "optim/flat/optimizer.hpp"
#include "optim/list_optimizer.hpp"
#include "optim/muon/optimizer.hpp"
#include "optim/zero/optimizer.hpp"

namespace ddp {
namespace {

using SettingsList = std::vector<detail::ParameterSettings>;

// nullptr if the list implementation is used.
std::unique_ptr<detail::FlatOptimizer> make_flat(const SettingsList& settings,
                                                 const OptimizerOptions& options,
                                                 detail::Listeners* exact_syncs) {
  if (options.implementation == OptimizerImplementation::List) {
    return nullptr;
  }
  const std::string reason = detail::reason_against_flat(settings, options);
  if (options.implementation == OptimizerImplementation::Flat && !reason.empty()) {
    throw SettingsError("optimizer.implementation=flat cannot be had: " + reason +
                        "; set it to auto or list");
  }
  const bool wanted = options.implementation == OptimizerImplementation::Flat ||
                      (!settings.empty() && settings.front().parameter.tensor.is_cuda());
  return wanted && reason.empty()
             ? std::make_unique<detail::FlatOptimizer>(settings, options, exact_syncs)
             : nullptr;
}

[[noreturn]] void refuse_zero(const std::string& reason) {
  throw SettingsError(concat("optimizer.zero1=true cannot be had: ", reason, "; set it to false"));
}

std::unique_ptr<Optimizer> make_zero(DataParallelModel& model, const OptimizerOptions& options) {
  const SettingsList settings = detail::settings_of_parameters(model.trained_parameters(), options);
  if (const auto reason = detail::reason_against_zero(settings, options); !reason.empty()) {
    refuse_zero(reason);
  }
  return std::make_unique<detail::ZeroOptimizer>(model, settings, options);
}

std::unique_ptr<Optimizer> make_flat_or_list(const SettingsList& settings,
                                             const OptimizerOptions& options,
                                             detail::Listeners* exact_syncs) {
  if (auto flat = make_flat(settings, options, exact_syncs)) {
    return flat;
  }
  return std::make_unique<detail::ListOptimizer>(settings, options, exact_syncs);
}

// A model's list has a shared weight under its first name only.
void add_other_names(SettingsList& settings, const DataParallelModel& model) {
  const auto& read_parameters = detail::all_tensors(model).read_parameters;
  if (!read_parameters) {
    return;
  }
  std::map<const c10::TensorImpl*, detail::ParameterSettings*> by_tensor;
  for (detail::ParameterSettings& each : settings) {
    by_tensor[each.parameter.tensor.unsafeGetTensorImpl()] = &each;
  }
  for (const auto& [name, tensor] : read_parameters()) {
    const auto found = by_tensor.find(tensor.unsafeGetTensorImpl());
    if (found != by_tensor.end() && found->second->parameter.name != name) {
      found->second->other_names.push_back(name);
    }
  }
}

// `model` may be null.
std::unique_ptr<Optimizer> make_muon(SettingsList settings, const OptimizerOptions& options,
                                     DataParallelModel* model, detail::Listeners* exact_syncs) {
  if (model != nullptr) {
    add_other_names(settings, *model);
  }
  detail::MuonOptimizer::Parts parts{.parameters = settings,
                                     .split = detail::split_for_muon(settings, options),
                                     .rest = nullptr,
                                     .model = model};
  if (!parts.split.rest.empty()) {
    OptimizerOptions of_rest = options;
    of_rest.type = OptimizerType::AdamW;
    parts.rest = make_flat_or_list(parts.split.rest, of_rest, exact_syncs);
  }
  return std::make_unique<detail::MuonOptimizer>(std::move(parts), options.muon);
}

// All but ZeRO-1. `model` may be null.
std::unique_ptr<Optimizer> make_whole(const NamedParameters& parameters,
                                      const OptimizerOptions& options, DataParallelModel* model) {
  const SettingsList settings = detail::settings_of_parameters(parameters, options);
  detail::Listeners* const exact_syncs =
      model == nullptr ? nullptr : &detail::exact_sync_listeners(*model);
  return options.type == OptimizerType::Muon ? make_muon(settings, options, model, exact_syncs)
                                             : make_flat_or_list(settings, options, exact_syncs);
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const NamedParameters& parameters,
                                          const OptimizerOptions& options) {
  options.usage.set();
  if (options.zero1) {
    refuse_zero("the optimizer was given parameters, not a DistributedDataParallel");
  }
  return make_whole(parameters, options, nullptr);
}

std::unique_ptr<Optimizer> make_optimizer(DataParallelModel& model,
                                          const OptimizerOptions& options) {
  options.usage.set();
  return options.zero1 ? make_zero(model, options)
                       : make_whole(model.trained_parameters(), options, &model);
}

}  // namespace ddp
