// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_tuner.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "comm/string_collectives.hpp"
#include "comm/tuning/group_choices.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"
#include "reduce/buckets/bucket_choice.hpp"

namespace ddp::detail {
namespace {

constexpr double kLaunchUs = 3;               // gathering a bucket, events and the launch itself
constexpr double kSlowdownOverlapped = 1.75;  // of a reduction while backward runs
constexpr double kToleranceUs = 3;
constexpr double kToleranceShare = 1e-3;  // of a backward
constexpr double kHostAhead = 1.5;        // GPU delay, in host times of a backward

std::vector<int64_t> bytes_in_order(const std::vector<ParameterSpec>& specs,
                                    const std::vector<int>& order) {
  std::vector<int64_t> bytes;
  bytes.reserve(order.size());
  for (const int index : order) {
    const auto& spec = specs[static_cast<size_t>(index)];
    bytes.push_back(spec.numel * spec.element_bytes);
  }
  return bytes;
}

}  // namespace

BucketTuner::BucketTuner(CommunicatorPtr communicator, const DdpOptions& options,
                         GradientArena& gradients, const BucketReductions& reductions)
    : communicator_(std::move(communicator)),
      options_(options),
      gradients_(gradients),
      reductions_(reductions) {}

bool BucketTuner::will_rebuild() const {
  return !has_rebuilt_ && communicator_->world_size() > 1 &&
         (options_.static_graph || !options_.find_unused_parameters) && !gradients_.specs().empty();
}

// Returns the key of this model's bucket sizes in the plan.
std::string BucketTuner::plan_name() const {
  int64_t bytes = 0;
  for (const auto& spec : gradients_.specs()) {
    bytes += spec.numel * spec.element_bytes;
  }
  const auto& hook = reductions_.hook();
  return concat("buckets of ", gradients_.specs().size(), " gradients, ", bytes, " bytes, hook ",
                hook ? hook->name() : "none");
}

// Returns the plan's choice for this model, equal on all ranks. A choice that cannot be read counts
// as none.
std::optional<std::string> BucketTuner::planned(const std::vector<int>& order) {
  const auto text = communicator_->choices().plan().find(plan_name());
  try {
    return text && BucketChoice::from_json(*text, bytes_in_order(gradients_.specs(), order))
               ? text
               : std::nullopt;
  } catch (const ReadError& error) {
    if (!std::exchange(has_warned_of_plan_, true) && communicator_->rank() == 0) {
      log_warning(concat(error.what(), "; this run measures them"));
    }
    return std::nullopt;
  }
}

bool BucketTuner::measures(const std::vector<int>& order) {
  return will_rebuild() && chooses_buckets(options_) && communicator_->world_size() > 1 &&
         !planned(order).has_value();
}

bool BucketTuner::is_due(int64_t num_passes, const std::vector<int>& ready_order) {
  return will_rebuild() && !ops::detail::is_capturing(communicator_->device()) &&
         num_passes >= first_with_order() + (measures(ready_order) ? 2 : 0);
}

void BucketTuner::begin_backward(int64_t num_passes, const std::vector<int>& ready_order) {
  const bool measures_now = measures(ready_order);
  measures_host_ = measures_now && num_passes == first_with_order();
  measures_device_ = measures_now && num_passes == first_with_order() + 1;
  if (measures_host_) {
    host_begin_ = std::chrono::steady_clock::now();
  }
  if (measures_device_) {
    ready_times_.resize(gradients_.specs().size());
    ops::detail::delay_device(communicator_->device(), kHostAhead * host_backward_ms_);
    ready_begin_.record(communicator_->device());
  }
}

void BucketTuner::record_ready(int parameter, bool all_ready) {
  if (measures_device_) {
    ready_times_[static_cast<size_t>(parameter)].record(communicator_->device(),
                                                        gradients_.slot(parameter).stream);
  }
  if (measures_host_ && all_ready) {
    host_backward_ms_ =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - host_begin_)
            .count();
  }
}

// Returns rank 0's choice from the plan or from the measured times. Empty: none.
std::string BucketTuner::choose(const std::vector<int>& order, const AllReduceTable& table) {
  const auto bytes = bytes_in_order(gradients_.specs(), order);
  if (const auto known = planned(order)) {
    return *known;
  }
  if (ready_times_.size() != gradients_.specs().size()) {
    return {};
  }
  std::vector<ReadyGradient> ready;
  const auto& hook = reductions_.hook();
  const double sent_fraction = hook ? hook->wire_fraction() : 1;
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& mark = ready_times_[static_cast<size_t>(order[i])];
    ready.push_back(
        {.num_bytes = static_cast<int64_t>(static_cast<double>(bytes[i]) * sent_fraction),
         .ready_us = 1e3 * TimingEvent::milliseconds(ready_begin_, mark)});
  }
  const auto reduction_us = [&](int64_t num_bytes, bool is_last) {
    return kLaunchUs + table.microseconds(num_bytes) * (is_last ? 1 : kSlowdownOverlapped);
  };
  const double tolerance = std::max(kToleranceUs, kToleranceShare * ready.back().ready_us);
  return choose_buckets(ready, reduction_us, tolerance).to_json(bytes);
}

// Returns where the ready order is cut; empty: at the limits. Collective.
std::vector<int> BucketTuner::agree_on_cuts(const std::vector<int>& order) {
  if (!chooses_buckets(options_) || communicator_->world_size() == 1) {
    return {};
  }
  const auto& table = communicator_->choices().all_reduce_table();
  const auto text =
      broadcast_string(*communicator_, communicator_->rank() == 0 ? choose(order, table) : "", 0);
  ready_times_.clear();
  if (text.empty()) {
    return {};
  }
  communicator_->choices().plan().set(plan_name(), text);
  const auto choice = BucketChoice::from_json(text, bytes_in_order(gradients_.specs(), order));
  DDP_CHECK(choice.has_value(), "rank 0's buckets are of other gradients");
  if (communicator_->rank() == 0) {
    log_info(concat("ddp.bucket_cap_mb=auto: ", choice->cuts.size(),
                    " reductions per step, expected exposed communication ",
                    static_cast<int64_t>(choice->exposed_us + 0.5), " us"));
  }
  return choice->cuts;
}

void BucketTuner::rebuild(const std::vector<int>& ready_order) {
  auto order = at::tensor(ready_order, at::kInt).to(communicator_->device());
  DDP_CHECK(order.numel() == static_cast<int64_t>(gradients_.specs().size()),
            "incomplete ready order");
  communicator_->broadcast(order, 0)->wait();
  order = order.cpu();
  const std::vector<int> agreed(order.data_ptr<int>(), order.data_ptr<int>() + order.numel());
  auto cuts = agree_on_cuts(agreed);
  auto rebuilt = assign_buckets(gradients_.specs(),
                                {.limits_bytes = bucket_limits_bytes(options_),
                                 .cuts = std::move(cuts),
                                 .membership = communicator_->membership()},
                                agreed);
  rebuilt.version = gradients_.layout().version + 1;
  gradients_.set_layout(std::move(rebuilt));
  has_rebuilt_ = true;
}

}  // namespace ddp::detail
