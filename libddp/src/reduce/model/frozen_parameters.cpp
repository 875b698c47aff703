// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/frozen_parameters.hpp"

#include <optional>
#include <utility>

#include "comm/string_collectives.hpp"
#include "core/control/rank_position.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr char kTrained = 't';
constexpr char kFrozen = 'f';
constexpr char kAlwaysFrozen = '-';

const char* describe(char flag) {
  return flag == kTrained ? "requires a gradient" : "is frozen";
}

}  // namespace

FrozenParameters::FrozenParameters(NamedParameters parameters, CommunicatorPtr communicator,
                                   bool is_static)
    : parameters_(std::move(parameters)),
      communicator_(std::move(communicator)),
      is_static_(is_static) {
  for (const auto& parameter : parameters_) {
    flags_ += parameter.tensor.requires_grad() ? kTrained : kAlwaysFrozen;
  }
  compared_.insert(flags_);
}

void FrozenParameters::update(bool in_join, const std::string& of_model, bool compares_once) {
  const auto is_trained = [&](size_t i) { return parameters_[i].tensor.requires_grad(); };
  const auto has_changed = [&](size_t i) { return is_trained(i) != (flags_[i] == kTrained); };
  size_t first_change = 0;  // of most forwards: none
  while (first_change < flags_.size() && !has_changed(first_change)) {
    ++first_change;
  }
  if (first_change == flags_.size()) {
    return;
  }
  std::string flags = flags_;
  for (size_t i = first_change; i < flags.size(); ++i) {
    if (has_changed(i)) {
      refuse(parameters_[i].name + of_model, flags_[i], in_join);
      flags[i] = is_trained(i) ? kTrained : kFrozen;
    }
  }
  if (!compares_once || !compared_.contains(flags)) {
    compare(first_change, flags, of_model);
    compared_.insert(flags);
  }
  flags_ = std::move(flags);
  covers_all_ = flags_.find(kTrained) == std::string::npos;
}

void FrozenParameters::refuse(const std::string& name, char flag, bool in_join) const {
  if (flag == kAlwaysFrozen) {
    throw SettingsError(concat(
        "parameter ", name,
        " was frozen when the model was wrapped, so its gradient would not be "
        "averaged; fix: wrap the model while the parameter requires a gradient, and freeze it "
        "afterwards"));
  }
  if (is_static_) {
    throw SettingsError(concat("requires_grad of parameter ", name,
                               " changed after wrapping, which ddp.static_graph=true excludes; "
                               "fix: set ddp.static_graph=false"));
  }
  if (in_join) {
    throw SettingsError(concat("requires_grad of parameter ", name,
                               " changed inside a join, where ranks without input cannot follow; "
                               "fix: change it before the join"));
  }
}

// Over the control plane the exchange also works while a graph is captured, and if only some ranks
// come here the others' waits show the deadlock.
void FrozenParameters::compare(size_t parameter, const std::string& flags,
                               const std::string& of_model) const {
  if (communicator_->world_size() == 1) {
    return;
  }
  const auto plane = communicator_->control_plane();
  std::optional<ActivityScope> activity;
  if (plane != nullptr) {
    activity.emplace(*plane, concat(kFrozenActivity, parameters_[parameter].name));
  }
  const auto all =
      plane != nullptr ? plane->all_gather(flags) : all_gather_string(*communicator_, flags);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t i = 0; i < flags.size(); ++i) {
      if (all[rank][i] != all[0][i]) {
        throw MismatchError(concat("parameter ", parameters_[i].name, of_model, " ",
                                   describe(all[0][i]), " on rank 0 but ", describe(all[rank][i]),
                                   " on rank ", rank,
                                   "; fix: set requires_grad in the same way on every rank"));
      }
    }
  }
}

}  // namespace ddp::detail
