// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/early_stopping.hpp"

#include <cmath>
#include <tuple>

#include "core/control/rank_position.hpp"
#include "core/control/wire/message_codec.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp {
namespace {

struct Metric {
  double value = 0;
  friend auto message_fields(Metric& metric) { return std::tie(metric.value); }
};

template <typename T>
T value_of(const StateDict& state, const std::string& key) {
  const auto found = state.values.find(key);
  if (found == state.values.end() || !std::holds_alternative<T>(found->second)) {
    throw MismatchError(concat("early stopping state: key ", key,
                               " is missing or has another type; fix: resume from a checkpoint "
                               "that EarlyStopping wrote"));
  }
  return std::get<T>(found->second);
}

}  // namespace

EarlyStopping::EarlyStopping(const Context& context, const EarlyStoppingOptions& options)
    : context_(context), options_(options), best_(options.maximize ? -HUGE_VAL : HUGE_VAL) {
  if (options_.patience < 1) {
    throw SettingsError(concat("EarlyStoppingOptions::patience=", options_.patience,
                               " must be 1 or more; fix: leave EarlyStopping out to train on"));
  }
  if (!(options_.min_delta >= 0)) {
    throw SettingsError(concat("EarlyStoppingOptions::min_delta=", options_.min_delta,
                               " must be 0 or more; fix: set maximize for metrics that grow"));
  }
}

bool EarlyStopping::is_better(double metric) const {
  return options_.maximize ? metric - options_.min_delta > best_
                           : metric + options_.min_delta < best_;
}

bool EarlyStopping::should_stop(double own_metric) {
  auto& plane = context_.control_plane();
  const detail::ActivityScope activity(plane, "early stopping");
  const double metric = detail::broadcast_message(plane, Metric{own_metric}).value;
  std::string reason;
  if (options_.check_finite && !std::isfinite(metric)) {
    reason = concat("the metric is ", metric);
  } else if (is_better(metric)) {
    best_ = metric;
    num_waits_ = 0;
  } else if (++num_waits_ >= options_.patience) {
    reason = concat("no improvement in ", num_waits_, " evaluations; the best was ", best_);
  }
  has_stopped_ = has_stopped_ || !reason.empty();
  if (!reason.empty() && context_.is_main()) {
    log_info("early stopping: " + reason);
  }
  return has_stopped_;
}

StateDict EarlyStopping::state_dict() const {
  StateDict state;
  state.values = {{"best", best_}, {"num_waits", num_waits_}, {"has_stopped", has_stopped_}};
  return state;
}

void EarlyStopping::load_state_dict(const StateDict& state) {
  const auto best = value_of<double>(state, "best");
  const auto num_waits = value_of<int64_t>(state, "num_waits");
  has_stopped_ = value_of<bool>(state, "has_stopped");
  best_ = best;
  num_waits_ = num_waits;
}

}  // namespace ddp
