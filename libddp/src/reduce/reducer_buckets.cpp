// SPDX-License-Identifier: Apache-2.0
// Laying the buckets out anew, once: in the order in which gradients become ready, cut at limits or
// (ddp.bucket_cap_mb=auto) where the least communication is exposed.
//
//   pass      order known | host's time taken | device's times taken | rebuild
//   fixed        0                                                     before 1
//   auto         0              1                    2                 before 3
//
// The device's times are taken with the host far ahead (a kernel that waits stands in front): a
// first eager backward is often bound by the host, and a captured one never is.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "reduce/bucket_choice.hpp"
#include "reduce/reducer_impl.hpp"
#include "reduce/replica_sync.hpp"

namespace ddp {
namespace {

constexpr double kLaunchUs = 3;          // gathering a bucket, events, the launch itself
constexpr double kBesideCompute = 1.75;  // a reduction shares memory and multiprocessors
constexpr double kToleranceUs = 3;
constexpr double kToleranceShare = 1e-3;  // of a backward
constexpr double kHostAhead = 1.5;        // of the host's time for a backward

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

bool Reducer::Impl::will_rebuild() const {
  return !has_rebuilt && communicator->world_size() > 1 &&
         (options.static_graph || !options.find_unused_parameters) && !parameters.empty();
}

// Another model, or another dtype on the wire, has other buckets.
std::string Reducer::Impl::plan_name() const {
  int64_t bytes = 0;
  for (const auto& spec : specs) {
    bytes += spec.numel * spec.element_bytes;
  }
  return detail::concat("buckets of ", specs.size(), " gradients, ", bytes, " bytes, hook ",
                        hook ? hook->name() : "none");
}

// What the plan says of this model's buckets, equal on all ranks. A choice that cannot be read
// counts as none, and is made anew.
std::optional<std::string> Reducer::Impl::planned_buckets() {
  const auto text = communicator->plan().find(plan_name());
  try {
    return text && detail::BucketChoice::from_json(*text,
                                                   bytes_in_order(specs, previous_ready_order))
               ? text
               : std::nullopt;
  } catch (const ReadError& error) {
    if (!std::exchange(damaged_buckets_told, true) && communicator->rank() == 0) {
      log_warning(detail::concat(error.what(), "; this run measures them"));
    }
    return std::nullopt;
  }
}

bool Reducer::Impl::measures_buckets() {
  return will_rebuild() && chooses_buckets(options) && communicator->world_size() > 1 &&
         !planned_buckets().has_value();
}

bool Reducer::Impl::rebuild_is_due() {
  const int64_t order_known = options.static_graph ? 2 : 1;
  return will_rebuild() && !detail::is_capturing(device()) &&
         num_passes >= order_known + (measures_buckets() ? 2 : 0);
}

// At the end of a forward.
void Reducer::Impl::begin_ready_times() {
  const int64_t order_known = options.static_graph ? 2 : 1;
  takes_host_time = measures_buckets() && num_passes == order_known;
  takes_ready_times = measures_buckets() && num_passes == order_known + 1;
  if (takes_host_time) {
    host_begin = std::chrono::steady_clock::now();
  }
  if (takes_ready_times) {
    ready_times.resize(parameters.size());
    detail::delay_device(device(), kHostAhead * host_backward_ms);
    ready_begin.record(device());
  }
}

void Reducer::Impl::note_ready_time(int parameter, bool all_ready) {
  if (takes_ready_times) {
    const auto index = static_cast<size_t>(parameter);
    ready_times[index].record(device(), parameters[index].slot.stream);
  }
  if (takes_host_time && all_ready) {
    host_backward_ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - host_begin)
            .count();
  }
}

// Rank 0's choice, as text: from the plan, or from the times it has just seen. Empty: none.
std::string Reducer::Impl::choose_buckets_here(const std::vector<int>& order,
                                               const AllReduceTable& table) {
  const auto bytes = bytes_in_order(specs, order);
  if (const auto known = planned_buckets()) {
    return *known;
  }
  if (ready_times.size() != parameters.size()) {
    return {};
  }
  std::vector<detail::ReadyGradient> gradients;
  const double on_wire = hook ? hook->wire_fraction() : 1;
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& mark = ready_times[static_cast<size_t>(order[i])];
    gradients.push_back({.num_bytes = static_cast<int64_t>(static_cast<double>(bytes[i]) * on_wire),
                         .ready_us = 1e3 * detail::TimeMark::milliseconds(ready_begin, mark)});
  }
  const auto reduction_us = [&](int64_t num_bytes, bool is_last) {
    return kLaunchUs + table.microseconds(num_bytes, !is_last) * (is_last ? 1 : kBesideCompute);
  };
  const double tolerance = std::max(kToleranceUs, kToleranceShare * gradients.back().ready_us);
  return detail::choose_buckets(gradients, reduction_us, tolerance).to_json(bytes);
}

// Where the ready order is cut; empty: at the limits. Collective.
std::vector<int> Reducer::Impl::agree_on_cuts(const std::vector<int>& order) {
  if (!chooses_buckets(options) || communicator->world_size() == 1) {
    return {};
  }
  const auto& table = communicator->all_reduce_table();
  const auto text = detail::broadcast_text(
      *communicator, communicator->rank() == 0 ? choose_buckets_here(order, table) : "", 0);
  ready_times.clear();
  if (text.empty()) {
    return {};
  }
  communicator->plan().set(plan_name(), text);
  const auto choice = detail::BucketChoice::from_json(text, bytes_in_order(specs, order));
  DDP_CHECK(choice.has_value(), "rank 0's buckets are of other gradients");
  if (communicator->rank() == 0) {
    log_info(detail::concat("ddp.bucket_cap_mb=auto: ", choice->cuts.size(),
                            " reductions a step, expected exposed communication ",
                            static_cast<int64_t>(choice->exposed_us + 0.5), " us"));
  }
  return choice->cuts;
}

void Reducer::Impl::rebuild() {
  const at::NoGradGuard no_grad;
  // Rank 0's order, so that all ranks cut the same buckets.
  auto order = at::tensor(previous_ready_order, at::kInt).to(device());
  DDP_CHECK(order.numel() == static_cast<int64_t>(parameters.size()), "incomplete ready order");
  communicator->broadcast(order, 0)->wait();
  order = order.cpu();
  const std::vector<int> agreed(order.data_ptr<int>(), order.data_ptr<int>() + order.numel());
  auto cuts = agree_on_cuts(agreed);

  // Gradients that live in the arena (no_sync steps before this forward) move with their slots.
  std::vector<std::pair<size_t, at::Tensor>> kept;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].tensor.grad();
    if (grad.defined() && grad.is_alias_of(parameters[i].slot.memory)) {
      kept.emplace_back(i, grad.clone());
    }
  }
  const BucketLayout old = layout;
  auto rebuilt = assign_buckets(specs,
                                {.limits_bytes = bucket_limits_bytes(options),
                                 .cuts = std::move(cuts),
                                 .world_size = communicator->world_size()},
                                agreed);
  rebuilt.version = old.version + 1;
  for (auto& arena : arenas) {
    arena.zero_();
  }
  install_layout(std::move(rebuilt));
  for (const auto& [i, grad] : kept) {
    parameters[i].slot.memory.copy_(grad);
    parameters[i].tensor.mutable_grad() = parameters[i].slot.memory;
  }
  has_rebuilt = true;
  if (hook) {
    hook->reset();
  }
  for (const auto& listener : layout_listeners) {
    listener(old, layout);
  }
}

}  // namespace ddp
