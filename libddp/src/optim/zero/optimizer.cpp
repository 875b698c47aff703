// SPDX-License-Identifier: Apache-2.0
#include "optim/zero/optimizer.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <map>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "optim/capture.hpp"
#include "optim/gradient_scan.hpp"
#include "optim/parameter_state.hpp"
#include "optim/state_check.hpp"
#include "optim/step_checks.hpp"

namespace ddp::detail {
namespace {

constexpr int32_t kNoParameter = std::numeric_limits<int32_t>::max();

constexpr int64_t kHasState = 0;  // rows of gather_counts
constexpr int64_t kStep = 1;

// The part of `layout`, a whole parameter, that `piece` is.
StateSlice slice_of(const ZeroPiece& piece, const at::Tensor& layout) {
  return {.sizes = layout.sizes().vec(), .strides = layout.strides().vec(), .begin = piece.begin};
}

}  // namespace

std::string reason_against_zero(const std::vector<ParameterSettings>& parameters,
                                const OptimizerOptions& options) {
  if (options.type == OptimizerType::Lars || options.type == OptimizerType::Lamb) {
    return "the trust ratios of lars and lamb are of whole parameters, and ranks update parts";
  }
  if (options.type == OptimizerType::Muon) {
    return "with optimizer.type=muon each rank already keeps the momentum of its matrices only";
  }
  if (options.implementation == OptimizerImplementation::List) {
    return "optimizer.implementation is list";
  }
  return reason_against_flat(parameters, options);
}

ZeroOptimizer::ZeroOptimizer(DataParallelModel& model,
                             const std::vector<ParameterSettings>& parameters,
                             const OptimizerOptions& options)
    : parameters_(model.trained_parameters()),
      settings_(parameters),
      options_(options),
      rule_(make_update_rule(options)),
      reducer_(model.reducer()),
      communicator_(model.communicator()),
      device_(communicator_->device()) {
  DDP_CHECK(settings_.size() == parameters_.size(), "a parameter has two names");
  reducer_.shard_gradients();
  on_new_layout_ = reducer_.layout_listeners().add([this] { reassign_shards(); });
  assign_shards();
}

void ZeroOptimizer::assign_shards() {
  buckets_ = shard_buckets(reducer_.gradients(), *communicator_);
  own_.reset();
  // In parameter order, because a scan reports the first parameter.
  std::map<size_t, at::Tensor> leaves;
  for (const ZeroBucket& bucket : buckets_) {
    for (const ZeroPiece& piece : bucket.pieces) {
      leaves[piece.parameter] = piece.leaf;
    }
  }
  std::vector<ParameterSettings> pieces;
  std::vector<int32_t> owners;
  for (const auto& [parameter, leaf] : leaves) {
    ParameterSettings& settings = pieces.emplace_back(settings_[parameter]);
    settings.parameter.tensor = leaf;
    owners.push_back(static_cast<int32_t>(parameter));
  }
  if (!pieces.empty()) {
    own_ = std::make_unique<FlatOptimizer>(pieces, options_);
    piece_parameters_ = at::tensor(owners, at::kInt).to(device_);
  }
  memories_.clear();
  for (const NamedParameter& parameter : parameters_) {
    memories_.push_back(memory_of(parameter.tensor));
  }
}

// A new bucket layout assigns other parts: sends the state to its new owners, bucket by bucket.
// Collective.
void ZeroOptimizer::reassign_shards() {
  refuse_to_make_while_capturing("the optimizer's parts of the buckets");
  const at::NoGradGuard no_grad;
  const StateDict before = own_ ? own_->state_dict() : StateDict();
  const at::Tensor counts = gather_counts(before);
  const std::vector<ZeroBucket> buckets = std::move(buckets_);
  assign_shards();
  StateDict now;
  now.values["type"] = rule_->type();
  for (const ZeroBucket& bucket : buckets) {
    gather_bucket(bucket, before, counts, now);
  }
  if (own_ && !now.tensors.empty()) {  // without state, its memory is made by the first step
    own_->load_state_dict(now);
  }
}

// Parameters with other memory now (set_data), in ascending order; other ranks may have others. A
// parameter that the buckets' views cannot show is refused. With `refuses` false it is skipped,
// because other ranks may be in a collective of this call: the next step refuses it.
std::vector<size_t> ZeroOptimizer::moved_parameters(bool refuses) const {
  std::vector<size_t> moved;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, now] = parameters_[i];
    const at::Tensor& before = memories_[i].layout;
    if (is_in(now, memories_[i])) {
      continue;
    }
    if (now.scalar_type() == before.scalar_type() && now.device() == device_ &&
        same_memory_layout(now, before)) {
      moved.push_back(i);
    } else if (refuses) {
      refuse_replaced(name);
    }
  }
  return moved;
}

// Updates the views, and with them the table of own_. State stays in place.
void ZeroOptimizer::update_moved_leaves() {
  const auto moved = moved_parameters(/*refuses=*/true);
  update_views(moved);
  for (const size_t i : moved) {
    memories_[i].data = parameters_[i].tensor.const_data_ptr();
    ++capture_version_;
  }
}

// Updates only the views: own_ then detects the move.
void ZeroOptimizer::update_views(const std::vector<size_t>& moved) const {
  if (moved.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (const ZeroBucket& bucket : buckets_) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const size_t parameter = bucket.parameters[i];
      if (!std::binary_search(moved.begin(), moved.end(), parameter)) {
        continue;
      }
      const at::Tensor leaf = flat_memory(parameters_[parameter].tensor);
      bucket.leaves[i].set_data(leaf);
      for (const ZeroPiece& piece : bucket.pieces) {
        if (piece.parameter == parameter) {
          piece.leaf.set_data(leaf.narrow(0, piece.begin, piece.leaf.numel()));
        }
      }
    }
  }
}

// Sets the gradients of the pieces. False: no parameter has a gradient on any rank.
bool ZeroOptimizer::read_gradients() {
  update_moved_leaves();
  bool any = false;
  for (const ZeroBucket& bucket : buckets_) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const NamedParameter& parameter = parameters_[bucket.parameters[i]];
      const at::Tensor& grad = parameter.tensor.grad();
      any = any || grad.defined();
      const void* const expected = static_cast<const char*>(bucket.buffer.const_data_ptr()) +
                                   bucket.offsets[i] * bucket.buffer.element_size();
      if (grad.defined() && grad.numel() > 0 && grad.const_data_ptr() != expected) {
        throw SettingsError(concat("optimizer.zero1=true: the gradient of ", parameter.name,
                                   " is not the one that backward reduced: change gradients in "
                                   "place, or set optimizer.zero1=false"));
      }
    }
    for (const ZeroPiece& piece : bucket.pieces) {
      piece.leaf.mutable_grad() =
          parameters_[piece.parameter].tensor.grad().defined() ? piece.gradient : at::Tensor();
    }
  }
  return any;
}

std::vector<at::Tensor> ZeroOptimizer::gradients() const {
  return own_gradients(reducer_.gradients(), *communicator_);
}

void ZeroOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  require_means();
  require_lr(scalars);
  const at::NoGradGuard no_grad;
  if (!read_gradients()) {
    return;
  }
  if (own_) {
    own_->step(scalars);
  }
  send_weights();
  clear_gradients();  // their memory holds weights now
}

void ZeroOptimizer::clear_gradients() {
  for (const NamedParameter& parameter : parameters_) {
    parameter.tensor.mutable_grad().reset();
  }
}

void ZeroOptimizer::send_weights() {
  const TraceScope trace("send weights", "compute");
  std::vector<WorkPtr> works;
  for (const ZeroBucket& bucket : buckets_) {
    copy_weights_to_bucket(bucket);
    works.push_back(gather_weights(bucket));
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    copy_weights_from_bucket(buckets_[b], works[b]);
  }
}

// Copies this rank's pieces into its part of the bucket.
void ZeroOptimizer::copy_weights_to_bucket(const ZeroBucket& bucket) const {
  if (communicator_->world_size() == 1 || bucket.pieces.empty()) {
    return;
  }
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (const ZeroPiece& piece : bucket.pieces) {
    to.push_back(bucket.weights_shard.narrow(0, piece.offset, piece.leaf.numel()));
    from.push_back(piece.leaf);
  }
  at::_foreach_copy_(to, from);
}

WorkPtr ZeroOptimizer::gather_weights(const ZeroBucket& bucket) const {
  const LabelScope label(bucket.label);
  return communicator_->world_size() == 1
             ? nullptr
             : communicator_->all_gather(bucket.weights, bucket.weights_shard);
}

// Copies all ranks' parts into the leaves.
void ZeroOptimizer::copy_weights_from_bucket(const ZeroBucket& bucket, const WorkPtr& work) const {
  if (!work) {
    return;
  }
  std::vector<at::Tensor> from;
  for (size_t i = 0; i < bucket.leaves.size(); ++i) {
    from.push_back(bucket.weights.narrow(0, bucket.offsets[i], bucket.leaves[i].numel()));
  }
  work->wait();
  at::_foreach_copy_(bucket.leaves, from);
}

void ZeroOptimizer::agree_on_found_inf(at::Tensor& found_inf) {
  communicator_->all_reduce(found_inf, ReduceOp::Max)->wait();
}

GradientScan ZeroOptimizer::scan_gradients(const StepScalar& inverse_scale, double max_norm) {
  const TraceScope trace("scan gradients", "compute");
  const at::NoGradGuard no_grad;
  read_gradients();
  // Rounded to float32, the parts of the sum would give other last bits with other buckets.
  const auto options = at::TensorOptions().device(device_);
  at::Tensor sums = at::zeros({2}, options.dtype(at::kDouble));
  at::Tensor first = at::full({1}, kNoParameter, options.dtype(at::kInt));
  if (own_) {
    const GradientScan own = own_->scan_gradients(inverse_scale, 0.0);
    sums = at::stack({own_->last_square_sum(), own.found_inf.to(at::kDouble)});
    const at::Tensor piece = own.first_non_finite.view({1});
    first = at::where(piece >= 0, piece_parameters_.index_select(0, piece.clamp_min(0)), first);
  }
  {
    const auto sum = communicator_->all_reduce(sums, ReduceOp::Sum);
    const auto minimum = communicator_->all_reduce(first, ReduceOp::Min);
    sum->wait();
    minimum->wait();
  }
  GradientScan scan;
  conclude_norm(scan, sums.select(0, 0).sqrt(), max_norm, at::kFloat);
  const at::Tensor any = sums.select(0, 1) > 0;
  scan.found_inf = any.to(at::kFloat);
  first = first.select(0, 0);
  scan.first_non_finite = at::where(any, first, at::full_like(first, -1));
  const at::Tensor& counts = non_finite_counts(device_);
  counts.select(0, 0).add_(any);
  counts.select(0, 1).copy_(at::where(any, first, counts.select(0, 1)));
  return scan;
}

std::vector<std::string> ZeroOptimizer::slots_of(const ZeroBucket& bucket) const {
  auto slots = rule_->slots();
  if (is_half(bucket.leaves.front().scalar_type())) {
    slots.emplace_back("master");
  }
  return slots;
}

// For every parameter, from the ranks with a piece of it: whether it has state, and its updates.
at::Tensor ZeroOptimizer::gather_counts(const StateDict& own) const {
  at::Tensor counts =
      at::zeros({2, static_cast<int64_t>(parameters_.size())}, at::TensorOptions(at::kFloat));
  for (const ZeroBucket& bucket : buckets_) {
    for (const ZeroPiece& piece : bucket.pieces) {
      const std::string& name = parameters_[piece.parameter].name;
      const auto column = static_cast<int64_t>(piece.parameter);
      for (const std::string& slot : slots_of(bucket)) {
        if (own.contains({name, slot})) {
          counts[kHasState][column] = 1;
        }
      }
      if (const auto step = own.tensors.find({name, "step"}); step != own.tensors.end()) {
        counts[kStep][column] = step->second.cpu();
      }
    }
  }
  counts = counts.to(device_);
  communicator_->all_reduce(counts, ReduceOp::Max)->wait();
  return counts.cpu();
}

// Gathers the state of a bucket of the layout before, and adds what this rank updates now.
void ZeroOptimizer::gather_bucket(const ZeroBucket& bucket, const StateDict& before,
                                  const at::Tensor& counts, StateDict& now) const {
  std::map<size_t, std::pair<int64_t, int64_t>> pieces;  // begin and numel, by parameter
  for (const ZeroBucket& next : buckets_) {
    for (const ZeroPiece& piece : next.pieces) {
      pieces[piece.parameter] = {piece.begin, piece.leaf.numel()};
    }
  }
  const auto has_state = [&](size_t parameter) {
    return counts[kHasState][static_cast<int64_t>(parameter)].item<float>() != 0.0F;
  };
  if (std::none_of(bucket.parameters.begin(), bucket.parameters.end(), has_state)) {
    return;
  }
  for (const std::string& slot : slots_of(bucket)) {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
    const at::Tensor part = at::zeros({bucket.shard.numel()}, options);
    for (const ZeroPiece& piece : bucket.pieces) {
      const auto found = before.tensors.find({parameters_[piece.parameter].name, slot});
      if (found != before.tensors.end()) {
        part.narrow(0, piece.offset, piece.leaf.numel()).copy_(found->second);
      }
    }
    const at::Tensor whole = at::empty({bucket.buffer.numel()}, options);
    communicator_->all_gather(whole, part)->wait();
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const size_t parameter = bucket.parameters[i];
      if (const auto piece = pieces.find(parameter);
          piece != pieces.end() && has_state(parameter)) {
        const auto [begin, numel] = piece->second;
        const std::string& name = parameters_[parameter].name;
        now.tensors[{name, slot}] = whole.narrow(0, bucket.offsets[i] + begin, numel).clone();
        if (rule_->counts_steps()) {
          now.tensors[{name, "step"}] = counts[kStep][static_cast<int64_t>(parameter)];
        }
      }
    }
  }
}

StateDict ZeroOptimizer::state_dict() const {
  const at::NoGradGuard no_grad;
  update_views(moved_parameters(/*refuses=*/false));
  const StateDict own = own_ ? own_->state_dict() : StateDict();
  StateDict state;
  state.values["type"] = rule_->type();
  for (const ZeroBucket& bucket : buckets_) {
    for (const ZeroPiece& piece : bucket.pieces) {
      const std::string& name = parameters_[piece.parameter].name;
      for (const std::string& slot : slots_of(bucket)) {
        if (const auto found = own.tensors.find({name, slot}); found != own.tensors.end()) {
          state.parts[found->first].push_back(
              {slice_of(piece, memories_[piece.parameter].layout), found->second});
        }
      }
      // Every rank with a piece has the whole count.
      if (const auto step = own.tensors.find({name, "step"}); step != own.tensors.end()) {
        state.parts[step->first].push_back({StateSlice(), step->second.view({1})});
      }
    }
  }
  return state;
}

void ZeroOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateCheck check(state, state_name());
  check.value("type", StateValue(rule_->type()));
  const at::Tensor count = at::zeros({}, at::TensorOptions(at::kFloat));
  for (const ZeroBucket& bucket : buckets_) {
    for (const size_t i : bucket.parameters) {
      std::map<StateKey, at::Tensor> expected;
      for (const std::string& slot : slots_of(bucket)) {
        expected[{parameters_[i].name, slot}] = parameters_[i].tensor;
      }
      if (rule_->counts_steps()) {
        expected[{parameters_[i].name, "step"}] = count;
      }
      check.all_or_none(expected, /*needs_all_parts=*/false);
    }
  }
  check.nothing_else();
  const StateDict own = own_part(state);
  ++capture_version_;
  if (own_) {
    own_->load_state_dict(own);
  }
}

// What own_ loads.
StateDict ZeroOptimizer::own_part(const StateDict& state) const {
  StateDict own;
  own.values = state.values;
  for (const ZeroBucket& bucket : buckets_) {
    for (const ZeroPiece& piece : bucket.pieces) {
      const std::string& name = parameters_[piece.parameter].name;
      for (const std::string& slot : slots_of(bucket)) {
        if (const StateKey key(name, slot); state.contains(key)) {
          own.tensors[key] =
              state.slice(key, memories_[piece.parameter].layout, piece.begin, piece.leaf.numel());
        }
      }
      if (const StateKey key(name, "step"); rule_->counts_steps() && state.contains(key)) {
        own.tensors[key] = state.whole(key);
      }
    }
  }
  return own;
}

}  // namespace ddp::detail
