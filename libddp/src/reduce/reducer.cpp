// SPDX-License-Identifier: Apache-2.0
#include "reduce/reducer.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "comm/string_collectives.hpp"
#include "core/fnv_hash.hpp"
#include "core/launch/training_state.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "reduce/hooks/comm_hook_table.hpp"
#include "reduce/sparse_gradients.hpp"

namespace ddp {
namespace {

std::vector<int64_t> bucket_bytes(const detail::GradientArena& gradients) {
  std::vector<int64_t> bytes;
  for (size_t b = 0; b < gradients.layout().buckets.size(); ++b) {
    bytes.push_back(static_cast<int64_t>(gradients.bucket(static_cast<int>(b)).buffer.nbytes()));
  }
  return bytes;
}

// Uses the control plane, because other ranks may wait in a collective of this pass or the next
// one.
void require_all_threw(Communicator& communicator, int64_t num_passes, bool runs_in_graphs) {
  const auto plane = communicator.control_plane();
  // Replays are not counted, and another rank may have replayed other steps.
  const std::string mine = runs_in_graphs
                               ? "a backward threw"
                               : concat("the backward after ", num_passes, " others threw");
  const auto all =
      plane != nullptr ? plane->all_gather(mine) : detail::all_gather_string(communicator, mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != mine) {
      throw MismatchError(concat(
          "rank ", communicator.rank(), " caught an exception of backward ", num_passes + 1,
          " and continued, but rank ", rank,
          " did not: the replicas have diverged; fix: let such an exception end the program, or "
          "catch it on all ranks"));
    }
  }
}

}  // namespace

Reducer::Reducer(NamedParameters parameters, CommunicatorPtr communicator,
                 const DdpOptions& options, const std::vector<bool>& sparse)
    : parts_(std::move(parameters), std::move(communicator), options, sparse),
      pass_(parts_),
      guard_(parts_, pass_),
      initial_bucket_bytes_(bucket_bytes(parts_.gradients)) {
  parts_.reductions.set_hook(detail::make_comm_hook(options));
}

void Reducer::begin_forward() {
  guard_.check_complete();
  guard_.drop_stale_counts();
  compare_hooks();
  const auto& history = pass_.history();
  if (history.num_passes > 0) {
    detail::record_later_step();
  }
  // A forward between a backward and the step of a sharded optimizer leaves the buckets as they
  // are. A later forward lays them out.
  if (!parts_.tuner.is_due(history.num_passes, history.ready_order) ||
      parts_.gradients.holds_partial_means()) {
    return;
  }
  const at::NoGradGuard no_grad;  // for the hook and the listeners too
  parts_.tuner.rebuild(history.ready_order);
  pass_.follow_layout();
  if (const auto& hook = parts_.reductions.hook()) {
    hook->reset();
  }
  layout_listeners_.notify();
}

// Hooks may be registered until the first forward, long after the settings were compared. Ranks
// with different hooks would call different collectives.
void Reducer::compare_hooks() {
  if (std::exchange(has_compared_hooks_, true) || parts_.communicator->world_size() == 1) {
    return;
  }
  const auto& hook = parts_.reductions.hook();
  const auto names = detail::all_gather_string(*parts_.communicator, hook ? hook->name() : "none");
  for (size_t rank = 1; rank < names.size(); ++rank) {
    if (names[rank] != names[0]) {
      throw MismatchError(concat("the ranks reduce with different comm hooks: rank ", rank,
                                 " has \"", names[rank], "\", rank 0 has \"", names[0],
                                 "\"; fix: register the same hook on every rank"));
    }
  }
}

void Reducer::register_comm_hook(std::shared_ptr<CommHook> hook) {
  auto& reductions = parts_.reductions;
  if (hook == nullptr) {
    throw SettingsError(
        "register_comm_hook: the hook is null; fix: omit the call, and the reducer all-reduces "
        "itself");
  }
  if (reductions.hook()) {
    throw SettingsError("register_comm_hook: the hook " + reductions.hook()->name() +
                        " is already set, and only one is allowed");
  }
  if (parts_.gradients.is_sharded()) {
    throw SettingsError(
        "register_comm_hook: with optimizer.zero1=true each rank reduces its part "
        "of the gradients, which hooks cannot do; fix: set optimizer.zero1=false");
  }
  if (has_compared_hooks_ || pass_.history().num_passes > 0) {
    throw SettingsError("register_comm_hook must be called before the first forward, on all ranks");
  }
  reductions.set_hook(std::move(hook));
}

void Reducer::shard_gradients() {
  if (const auto sparse = detail::sparse_indices(parts_.gradients); !sparse.empty()) {
    throw SettingsError(
        "optimizer.zero1=true: with ddp.sparse=gather parameter " +
        parts_.parameter_name(sparse[0]) +
        " has sparse gradients, whose rows cannot be divided over the ranks; fix: set "
        "optimizer.zero1=false, or sparse(false) in the embeddings");
  }
  if (const auto& hook = parts_.reductions.hook()) {
    throw SettingsError("optimizer.zero1=true: gradients are reduced by the comm hook " +
                        hook->name() + ", which cannot reduce parts; fix: set ddp.comm_hook=none");
  }
  if (parts_.gradients.is_sharded()) {
    throw SettingsError("optimizer.zero1=true: the model already has a sharded optimizer");
  }
  DDP_CHECK(pass_.history().num_passes == 0, "whole gradients were already reduced");
  parts_.gradients.shard();
}

void Reducer::finish_pending() {
  parts_.buffers.finish();
  parts_.reductions.join_streams();
}

void Reducer::join_broken_backward() {
  if (!pass_.threw()) {
    return;
  }
  auto& communicator = *parts_.communicator;
  const auto num_passes = pass_.history().num_passes;
  const bool compares_first = communicator.control_plane() != nullptr;
  const auto before = state();
  if (compares_first) {
    require_all_threw(communicator, num_passes, runs_in_graphs_);
  }
  detail::drop_sparse(parts_.gradients);
  pass_.complete();
  restore(before);
  drop_local();
  if (!compares_first) {
    require_all_threw(communicator, num_passes,
                      runs_in_graphs_);  // a collective, so it follows those of the pass
  }
}

Reducer::Local Reducer::local(bool copies) const {
  return {parts_.gradients.save(copies), parts_.mean.counts(), parts_.unused.used()};
}

Reducer::Local Reducer::take_local() {
  auto taken = local(/*copies=*/true);
  drop_local();
  return taken;
}

void Reducer::drop_local() {
  parts_.gradients.drop();
  parts_.mean.reset();
  parts_.unused.forget_used();
}

void Reducer::restore_local(const Local& local) {
  parts_.gradients.restore(local.gradients);
  parts_.mean.set_counts(local.counts);
  parts_.unused.set_used(local.used);
}

void Reducer::run_weighted(const at::Tensor& loss_sum,
                           const std::function<void(detail::WeightedMean&)>& add_count) {
  guard_.drop_stale_counts();
  auto& mean = parts_.mean;
  const auto counts_before = mean.counts();
  add_count(mean);
  mean.set_runs_weighted(true);
  try {
    loss_sum.backward();
  } catch (...) {
    mean.set_runs_weighted(false);
    // join_broken_backward() completes a broken backward and needs its counts. Otherwise the next
    // backward would divide by them too.
    if (!pass_.threw()) {
      mean.undo_add(counts_before);
    }
    throw;
  }
  mean.set_runs_weighted(false);
}

bool Reducer::is_settled() const {
  return (has_compared_hooks_ || parts_.communicator->world_size() == 1) &&
         !parts_.tuner.will_rebuild() &&
         pass_.history().num_passes > (parts_.options.static_graph ? 1 : 0);
}

std::string Reducer::why_not_captured() const {
  if (parts_.options.find_unused_parameters && !parts_.options.static_graph) {
    return "ddp.find_unused_parameters=true reads on the host which parameters were used; set it "
           "to false, or ddp.static_graph=true";
  }
  if (!detail::sparse_indices(parts_.gradients).empty()) {
    return "ddp.sparse=gather reads on the host how many rows the ranks gather; set sparse(false) "
           "in the embeddings";
  }
  const auto& hook = parts_.reductions.hook();
  if (hook != nullptr && !hook->capturable()) {
    return "the comm hook " + hook->name() + " cannot be captured (CommHook::capturable is false)";
  }
  return {};
}

uint64_t Reducer::hash_gradients() const {
  detail::FnvHash hash;
  const auto& parameters = parts_.gradients.parameters();
  const auto& used = parts_.unused.used();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].tensor.grad();
    if (!grad.defined()) {
      hash.add(1);
      continue;
    }
    hash.add(grad.has_storage() ? reinterpret_cast<uintptr_t>(grad.const_data_ptr())
                                : uintptr_t{2});
    const bool is_mean = parts_.gradients.slot(static_cast<int>(i)).reduced;
    hash.add((is_mean ? 1U : 0U) + (used[i] ? 2U : 0U));
  }
  hash.add(parts_.mean.counts().is_plain ? 1 : 0);
  return hash.value();
}

Reducer::State Reducer::state() const {
  return {local(/*copies=*/false), parts_.unused.history(), pass_.history(),
          parts_.buffers.state()};
}

void Reducer::restore(const State& state) {
  pass_.restore(state.history);
  restore_local(state.local);
  parts_.unused.set_history(state.unused);
  parts_.buffers.set_state(state.buffers);
}

// Counts of weighted_backward add up from one step to the next on the host.
std::string detail::why_not_replayed(Reducer& reducer, const Reducer::State& before) {
  if (before.local.counts.empty() && reducer.mean().counts().empty()) {
    return {};
  }
  return "weighted_backward under no_sync() and the synchronised one after it are in different "
         "steps; put all micro-batches of an optimizer step into one GraphedStep call";
}

DdpLoggingData Reducer::logging_data() {
  const auto& history = pass_.history();
  const auto& gradients = parts_.gradients;
  DdpLoggingData data;
  data.num_parameter_tensors = static_cast<int64_t>(gradients.parameters().size());
  for (const auto& parameter : gradients.parameters()) {
    data.total_parameter_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  data.bucket_sizes = initial_bucket_bytes_;
  data.has_rebuilt_buckets = parts_.tuner.has_rebuilt();
  if (data.has_rebuilt_buckets) {
    data.rebuilt_bucket_sizes = bucket_bytes(gradients);
    for (const auto& bucket : gradients.layout().buckets) {
      data.rebuilt_per_bucket_param_indices.push_back(bucket.parameters);
    }
  }
  data.prev_iteration_grad_ready_order_indices = history.ready_order;
  data.unused_parameter_size = parts_.unused.num_unused();
  data.can_set_static_graph = history.num_passes > 0 && !parts_.unused.set_changed();
  data.num_synchronised_backwards = history.num_passes;
  parts_.timing.add_to(data);
  return data;
}

}  // namespace ddp
