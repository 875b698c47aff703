// SPDX-License-Identifier: Apache-2.0
#include "optim/muon/optimizer.hpp"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <utility>

#include "comm/first_problem.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "optim/capture.hpp"
#include "optim/muon/newton_schulz.hpp"
#include "optim/state_check.hpp"
#include "optim/step_checks.hpp"
#include "reduce/model/replica_check.hpp"

namespace ddp::detail {
namespace {

constexpr const char* kType = "muon";

using Tensors = std::map<StateKey, at::Tensor>;

bool has_gradient(const ParameterState& member) {
  return member.leaf.grad().defined();
}

// Throws if no state can be made for the member.
void require_stateable(const ParameterState& member) {
  refuse_to_make_while_capturing(concat("optimizer state of ", member.name));
  check_leaf(member);
  if (member.leaf.sizes() != member.memory.layout.sizes()) {
    refuse_replaced(member.name);
  }
}

// The slots of one matrix.
Tensors tensors_of(const ParameterState& member) {
  Tensors tensors;
  tensors[{member.name, "momentum_buffer"}] = member.slots.front();
  if (member.needs_master) {
    tensors[{member.name, "master"}] = member.updated;
  }
  return tensors;
}

// The same keys, with any tensors of the right shape.
Tensors expected_of(const ParameterState& member) {
  Tensors tensors;
  tensors[{member.name, "momentum_buffer"}] = member.leaf;
  if (member.needs_master) {
    tensors[{member.name, "master"}] = member.leaf;
  }
  return tensors;
}

// A view of a batch, whose memory is dense, as the only part of a divided tensor.
StatePart whole_part(const at::Tensor& view) {
  return {{.sizes = view.sizes().vec(), .strides = view.strides().vec(), .begin = 0},
          view.as_strided({view.numel()}, {1}, view.storage_offset())};
}

// One tensor of each member with a gradient.
template <typename TensorOf>
std::vector<at::Tensor> of_active(const MuonBatch& batch, TensorOf tensor_of) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < batch.members.size(); ++i) {
    if (has_gradient(batch.members[i])) {
      tensors.push_back(tensor_of(i));
    }
  }
  return tensors;
}
std::vector<at::Tensor> active_views(const MuonBatch& batch, const at::Tensor& tensor) {
  return of_active(batch, [&](size_t i) { return batch.view(tensor, i); });
}
std::vector<at::Tensor> gradients_of(const MuonBatch& batch) {
  return of_active(batch, [&](size_t i) { return batch.members[i].leaf.grad(); });
}
std::vector<at::Tensor> leaves_of(const MuonBatch& batch) {
  return of_active(batch, [&](size_t i) { return batch.members[i].leaf; });
}
std::vector<at::Tensor> updated_of(const MuonBatch& batch) {
  return of_active(batch, [&](size_t i) { return batch.members[i].updated; });
}

// [members, rows, cols] from one tensor of each member with a gradient, zeros for the others.
at::Tensor collect(const MuonBatch& batch, const std::vector<at::Tensor>& tensors) {
  const at::Tensor all = batch.empty();
  if (tensors.size() < batch.members.size()) {
    all.zero_();
  }
  at::_foreach_copy_(active_views(batch, all), tensors);
  return all;
}

}  // namespace

MuonOptimizer::MuonOptimizer(Parts parts, const MuonOptions& options)
    : options_(options),
      rest_(std::move(parts.rest)),
      product_dtype_(parts.product_dtype),
      batches_(make_batches(parts.split.matrices, options)) {
  for (const ParameterSettings& settings : parts.parameters) {
    parameters_.push_back(settings.parameter);
  }
  for (const ParameterSettings& settings : parts.split.matrices) {
    matrices_.push_back(settings.parameter);
  }
  if (parts.model != nullptr) {
    on_exact_sync_ = exact_sync_listeners(*parts.model).add([this] { restart_masters(); });
    if (parts.model->communicator()->world_size() > 1) {
      communicator_ = parts.model->communicator();
      assign_owners(batches_, communicator_->world_size());
      plan_exchanges();
      on_join_ = join_listeners(*parts.model).add([] {
        throw SettingsError(
            "join(model, loop) does not support optimizer.type=muon, because ranks without input "
            "must still update and send their matrices; fix: use join(model, step, has_batch), or "
            "another optimizer.type");
      });
    }
  }
  log_info(describe(parts.split));
}

bool MuonOptimizer::owns(const MuonBatch& batch) const {
  return communicator_ == nullptr || batch.owner == communicator_->rank();
}

void MuonOptimizer::plan_exchanges() {
  const auto world_size = static_cast<size_t>(communicator_->world_size());
  std::map<at::ScalarType, std::vector<int64_t>> used;  // elements of each rank
  for (const MuonBatch& batch : batches_) {
    auto& elements = used.try_emplace(batch.leaf_dtype, world_size).first->second;
    elements[static_cast<size_t>(batch.owner)] +=
        std::ssize(batch.members) * batch.rows * batch.cols;
  }
  for (auto& [dtype, elements] : used) {
    Exchange& exchange = exchanges_.emplace_back();
    exchange.label = make_label(concat("matrices of Muon: ", dtype));
    exchange.dtype = dtype;
    exchange.part = *std::max_element(elements.begin(), elements.end());
    for (size_t rank = 0; rank < world_size; ++rank) {
      elements[rank] = exchange.part * static_cast<int64_t>(rank);  // the next offset
    }
    for (size_t b = 0; b < batches_.size(); ++b) {
      const MuonBatch& batch = batches_[b];
      if (batch.leaf_dtype != dtype) {
        continue;
      }
      int64_t& offset = elements[static_cast<size_t>(batch.owner)];
      for (size_t i = 0; i < batch.members.size(); ++i) {
        exchange.pieces.push_back({b, i, offset});
        offset += batch.rows * batch.cols;
      }
    }
  }
}

bool MuonOptimizer::scales_gradients_in_step() const {
  return rest_ == nullptr || rest_->scales_gradients_in_step();
}

// Checks all leaves with a gradient, also those of other owners, whose weights arrive here.
void MuonOptimizer::prepare_members() {
  for (MuonBatch& batch : batches_) {
    for (size_t i = 0; i < batch.members.size(); ++i) {
      ParameterState& member = batch.members[i];
      if (!checked_gradient(member.name, member.leaf).defined()) {
        continue;
      }
      check_leaf(member);
      if (member.updated.defined()) {
        update_master(member);
      } else {
        make_state(batch, i);
      }
    }
  }
}

// One allocation for the momentum of a batch and one for its masters. Another owner's member only
// gets the layout that its leaf must keep.
void MuonOptimizer::make_state(MuonBatch& batch, size_t index) const {
  ParameterState& member = batch.members[index];
  require_stateable(member);
  member.memory = memory_of(member.leaf);
  member.updated = member.leaf;
  if (!owns(batch)) {
    return;
  }
  if (!batch.momentum.defined()) {
    batch.momentum = batch.empty().zero_();
    batch.masters = member.needs_master ? batch.empty().zero_() : at::Tensor();
  }
  member.slots = {batch.view(batch.momentum, index)};
  if (member.needs_master) {
    member.updated = batch.view(batch.masters, index);
    member.updated.copy_(member.leaf);
  }
  member.has_state = true;
}

void MuonOptimizer::restart_masters() {
  for (const MuonBatch& batch : batches_) {
    for (const ParameterState& member : batch.members) {
      restart_master(member);
    }
  }
}

void MuonOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  require_means();
  require_lr(scalars);
  if (is_known_to_skip(scalars)) {  // on all ranks: gradients are equal
    return;
  }
  const at::NoGradGuard no_grad;
  prepare_members();
  for (MuonBatch& batch : batches_) {
    if (owns(batch) && std::any_of(batch.members.begin(), batch.members.end(), has_gradient)) {
      update(batch, scalars);
    }
  }
  for (Exchange& exchange : exchanges_) {
    start(exchange);
  }
  FirstProblem refusal;
  refusal.attempt([&] { step_rest(scalars); });
  for (Exchange& exchange : exchanges_) {  // a refusal, too, leaves equal matrices on all ranks
    finish(exchange);
  }
  bump_versions(matrices_);
  refusal.rethrow();
}

void MuonOptimizer::step_rest(const StepScalars& scalars) {
  if (rest_) {
    const ReplicaCheck::Hold hold;  // require_means() checked all parameters
    const int64_t version = rest_->capture_version();
    rest_->step(scalars);
    capture_version_ += rest_->capture_version() - version;
  }
}

// The order of operations is that of torch.optim.Muon. Rates are tensors in eager and in captured
// steps, so both give the same bits. Matrices without a gradient take part as zeros: the shapes of
// the products, and with them the bits of the others, do not depend on who has a gradient.
void MuonOptimizer::update(const MuonBatch& batch, const StepScalars& scalars) const {
  const at::Tensor lr =
      factor_tensor(scalars.lr, batch.device, batch.dtype).to(at::kDouble).mul(batch.lr_scale);
  const at::Tensor decay = at::rsub(lr.mul(batch.weight_decay), 1.0).to(batch.dtype);
  const at::Tensor negative_rate = lr.mul(-batch.factor).to(batch.dtype);

  const at::Tensor gradients = collect(batch, gradients_of(batch));
  if (const auto factor = factor_of(scalars, batch.device, batch.dtype)) {
    gradients.mul_(*factor);
  }
  at::Tensor momentum = at::lerp(batch.momentum, gradients, 1.0 - options_.momentum);
  const at::Tensor direction =
      newton_schulz(options_.nesterov ? at::lerp(gradients, momentum, options_.momentum) : momentum,
                    product_dtype_, options_.ns_steps);
  const std::vector<at::Tensor> updated = updated_of(batch);
  const at::Tensor before = collect(batch, updated);
  at::Tensor weights = at::mul(before, decay).addcmul_(direction.to(batch.dtype), negative_rate);

  if (scalars.found_inf.defined()) {  // only the device may know it
    const at::Tensor skips = at::ne(scalars.found_inf.tensor(batch.device), 0.0);
    momentum = at::where(skips, batch.momentum, momentum);
    weights = at::where(skips, before, weights);
  }
  at::_foreach_copy_(active_views(batch, batch.momentum), active_views(batch, momentum));
  at::_foreach_copy_(updated, active_views(batch, weights));
  if (batch.masters.defined()) {
    at::_foreach_copy_(leaves_of(batch), updated);
  }
}

at::Tensor MuonOptimizer::slot_of(const Exchange& exchange, const Exchange::Piece& piece) const {
  const at::Tensor& leaf = batches_[piece.batch].members[piece.member].leaf;
  return exchange.buffer.narrow(0, piece.offset, leaf.numel()).view(leaf.sizes());
}

// Sends all own matrices, with or without a gradient, so that a buffer has one size in all steps.
void MuonOptimizer::start(Exchange& exchange) const {
  const TraceScope trace("send weights", "compute");
  exchange.buffer =
      at::empty({exchange.part * communicator_->world_size()},
                at::TensorOptions().dtype(exchange.dtype).device(communicator_->device()));
  const at::Tensor own =
      exchange.buffer.narrow(0, exchange.part * communicator_->rank(), exchange.part);
  own.zero_();  // the part of the busiest rank may be larger than this rank's matrices
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (const Exchange::Piece& piece : exchange.pieces) {
    if (owns(batches_[piece.batch])) {
      to.push_back(slot_of(exchange, piece));
      from.push_back(batches_[piece.batch].members[piece.member].leaf);
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  const LabelScope label(exchange.label);
  exchange.work = communicator_->all_gather(exchange.buffer, own);
}

// A matrix without a gradient did not change, and writing it would raise its version counter.
void MuonOptimizer::finish(Exchange& exchange) const {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (const Exchange::Piece& piece : exchange.pieces) {
    const MuonBatch& batch = batches_[piece.batch];
    if (const ParameterState& member = batch.members[piece.member];
        !owns(batch) && has_gradient(member)) {
      to.push_back(member.leaf);
      from.push_back(slot_of(exchange, piece));
    }
  }
  std::exchange(exchange.work, nullptr)->wait();
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  exchange.buffer = at::Tensor();
}

StateDict MuonOptimizer::replicated_state() const {
  StateDict state = rest_ ? rest_->replicated_state() : StateDict();
  for (const MuonBatch& batch : batches_) {
    for (const ParameterState& member : batch.members) {
      if (communicator_ == nullptr && member.has_state) {
        state.tensors.merge(tensors_of(member));
      }
    }
  }
  return state;
}

StateDict MuonOptimizer::state_dict() const {
  const at::NoGradGuard no_grad;
  StateDict state = rest_ ? rest_->state_dict() : StateDict();
  state.values["type"] = kType;
  for (const MuonBatch& batch : batches_) {
    for (const ParameterState& member : batch.members) {
      if (!member.has_state) {
        continue;
      }
      check_leaf(member);
      update_master(member);
      for (const auto& [key, tensor] : tensors_of(member)) {
        if (communicator_ == nullptr) {
          state.tensors[key] = tensor;
        } else {
          state.parts[key].push_back(whole_part(tensor));
        }
      }
    }
  }
  return state;
}

void MuonOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateDict own = state;
  const StateDict rest = take_rest(own);
  StateCheck check(own, state_name());
  check.value("type", StateValue(kType));
  std::set<std::string> found;
  for (const MuonBatch& batch : batches_) {
    for (const ParameterState& member : batch.members) {
      if (check.all_or_none(expected_of(member), /*needs_all_parts=*/owns(batch))) {
        found.insert(member.name);
        if (!member.updated.defined()) {
          require_stateable(member);  // on all ranks, not only where load_member() makes its state
        }
      }
    }
  }
  check.nothing_else();
  if (rest_) {
    rest_->load_state_dict(rest);  // unchanged if it throws, as everything else here
  }
  ++capture_version_;
  for (MuonBatch& batch : batches_) {
    for (size_t i = 0; owns(batch) && i < batch.members.size(); ++i) {
      load_member(batch, i, found.contains(batch.members[i].name) ? &own : nullptr);
    }
  }
}

// With a null `state` the member has none: its next gradient is its first.
void MuonOptimizer::load_member(MuonBatch& batch, size_t index, const StateDict* state) const {
  ParameterState& member = batch.members[index];
  if (state == nullptr) {
    if (member.has_state) {
      member.slots.front().zero_();
      member.slots.clear();
      member.updated = at::Tensor();  // the first step makes it from the leaf of then
      member.has_state = false;
    }
    return;
  }
  if (!member.has_state) {
    make_state(batch, index);
  }
  for (auto& [key, tensor] : tensors_of(member)) {
    tensor.copy_(state->whole(key));
  }
}

// Moves what belongs to the rest out of `state`.
StateDict MuonOptimizer::take_rest(StateDict& state) const {
  std::set<std::string> names;
  for (const NamedParameter& parameter : rest_ ? rest_->named_parameters() : NamedParameters()) {
    names.insert(parameter.name);
  }
  StateDict rest;
  rest.values["type"] = "adamw";
  const auto take = [&](auto& from, auto& to) {
    for (auto entry = from.begin(); entry != from.end();) {
      const auto next = std::next(entry);
      if (names.contains(entry->first.parameter)) {
        to.insert(from.extract(entry));
      }
      entry = next;
    }
  };
  take(state.tensors, rest.tensors);
  take(state.parts, rest.parts);
  return rest;
}

}  // namespace ddp::detail
