// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/gradient_arena.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <map>
#include <tuple>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/timing_event.hpp"

namespace ddp::detail {

using ops::detail::current_stream;
using ops::detail::is_capturing;
using ops::detail::wait_for;

namespace {

at::ScalarType grad_dtype(const at::Tensor& parameter, const DdpOptions& options) {
  const auto leaf = parameter.scalar_type();
  const bool is_half = leaf == at::kHalf || leaf == at::kBFloat16;
  return is_half && options.fp32_grads ? at::kFloat : leaf;
}

// Returns a view with the parameter's own strides if they are dense (channels_last stays
// channels_last), so that copies between gradient and slot are linear.
at::Tensor slot_view(const at::Tensor& arena, const at::Tensor& parameter, int64_t offset) {
  // detach_() fails on views, and torch::optim's zero_grad(false) calls it on .grad. So this view
  // is hidden from autograd.
  const at::AutoDispatchBelowADInplaceOrView no_view_tracking;
  if (parameter.is_non_overlapping_and_dense()) {
    return arena.as_strided(parameter.sizes(), parameter.strides(), offset);
  }
  return arena.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

bool aliases(const at::Tensor& grad, const at::Tensor& slot) {
  return grad.data_ptr() == slot.data_ptr() && grad.scalar_type() == slot.scalar_type() &&
         grad.is_alias_of(slot);
}

// AccumulateGrad adds to a sparse .grad in place, so it remains the same tensor.
bool lies_in(const at::Tensor& parameter, const ops::GradSlot& slot) {
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined() || !slot.memory.defined()) {
    return false;
  }
  return grad.has_storage() && slot.memory.has_storage() ? grad.is_alias_of(slot.memory)
                                                         : grad.is_same(slot.memory);
}

// The slot in which .grad lies: `own`, or that of another reducer of the same parameter. nullptr:
// no slot.
const ops::GradSlot* slot_holding_grad(const at::Tensor& parameter, const ops::GradSlot& own) {
  if (lies_in(parameter, own)) {
    return &own;
  }
  return ops::has_several_grad_slots(parameter) ? ops::slot_of_grad(parameter) : nullptr;
}

// The stream that reads `tensor` now may not be the one that its memory belongs to.
void use_until_freed(const at::Tensor& tensor) {
  if (!tensor.is_cpu() && !is_capturing(tensor.device())) {
    tensor.record_stream(current_stream(tensor.device()));
  }
}

// "bucket 4: layer2.1.conv2.weight … layer2.0.bn1.bias"
CollectiveLabel label_of(size_t index, const std::string& of_model, const Bucket& bucket,
                         const NamedParameters& parameters) {
  const auto name = [&](int parameter) { return parameters[static_cast<size_t>(parameter)].name; };
  const bool is_single = bucket.parameters.size() == 1;
  return make_label(concat("bucket ", index, of_model, ": ", name(bucket.parameters.front()),
                           is_single ? "" : " … " + name(bucket.parameters.back())));
}

void clear_writes(ops::GradSlot& slot) {
  slot.written = false;
  slot.stream = std::nullopt;
}

}  // namespace

GradientArena::GradientArena(NamedParameters parameters, CommunicatorPtr communicator,
                             const DdpOptions& options, const std::vector<bool>& sparse)
    : parameters_(std::move(parameters)),
      communicator_(std::move(communicator)),
      of_model_(of_model(options)),
      gradients_(parameters_.size()) {
  const auto device = communicator_->device();
  std::map<std::tuple<at::ScalarType, at::ScalarType>, int> keys;
  for (const auto& [name, tensor] : parameters_) {
    if (tensor.device() != device) {
      throw SettingsError(concat("parameter ", name, " is on ", tensor.device(),
                                 " but the communicator works on ", device,
                                 "; fix: move the module there before wrapping it"));
    }
    const auto dtype = grad_dtype(tensor, options);
    const auto [found, inserted] =
        keys.try_emplace({tensor.scalar_type(), dtype}, static_cast<int>(keys.size()));
    const bool is_sparse = !sparse.empty() && sparse[specs_.size()];
    specs_.push_back({.numel = is_sparse ? 1 : tensor.numel(),
                      .element_bytes = static_cast<int64_t>(c10::elementSize(dtype)),
                      .key = found->second,
                      .is_sparse = is_sparse});
    if (inserted) {
      arenas_.push_back(at::empty({0}, tensor.options().dtype(dtype)));  // replaced by allocate()
    }
  }
  allocate(options);
  // Until the ready order is known there is one bucket per key. find_unused_parameters never
  // rebuilds.
  const bool unbounded = !options.find_unused_parameters || options.static_graph;
  cut(assign_buckets(
      specs_, {.limits_bytes = unbounded ? std::vector<int64_t>{} : bucket_limits_bytes(options),
               .membership = communicator_->membership()}));
}

GradientArena::~GradientArena() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    // When the slot is gone, nothing shows that .grad holds only this rank's part.
    if (is_sharded_ && lies_in(parameter, gradients_[i].slot)) {
      parameter.mutable_grad() = at::Tensor();
    }
    ops::remove_grad_slot(parameter, gradients_[i].slot);
  }
}

void GradientArena::allocate(const DdpOptions& options) {
  // Buckets that are chosen from times may be as small as one parameter.
  const BucketLayoutOptions limits{.limits_bytes = chooses_buckets(options)
                                                       ? std::vector<int64_t>{1}
                                                       : bucket_limits_bytes(options),
                                   .membership = communicator_->membership()};
  for (size_t key = 0; key < arenas_.size(); ++key) {
    const int64_t numel = max_arena_numel(specs_, limits, static_cast<int>(key));
    arenas_[key] =
        at::zeros({numel}, arenas_[key].options());  // padding between gradients is reduced too
  }
}

void GradientArena::cut(BucketLayout layout) {
  layout_ = std::move(layout);
  buckets_.assign(layout_.buckets.size(), {});
  memory_.clear();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = layout_.buckets[b];
    const at::Tensor& arena = arenas_[static_cast<size_t>(bucket.key)];
    auto& view = buckets_[b];
    view.index = static_cast<int>(b);
    view.is_last = b + 1 == buckets_.size();
    view.buffer = arena.narrow(0, bucket.begin, bucket.numel);
    memory_.push_back({view.buffer, label_of(b, of_model_, bucket, parameters_)});
    const int64_t part = is_sharded_ ? bucket.numel / communicator_->world_size() : bucket.numel;
    view.shard = view.buffer.narrow(0, is_sharded_ ? part * communicator_->rank() : 0, part);
    view.communicator = communicator_.get();
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const auto parameter = static_cast<size_t>(bucket.parameters[i]);
      const at::Tensor& tensor = parameters_[parameter].tensor;
      auto& slot = gradients_[parameter].slot;
      slot.is_sharded = is_sharded_;
      clear_writes(slot);
      ops::add_grad_slot(tensor, slot);
      if (specs_[static_cast<size_t>(bucket.parameters[i])].is_sparse) {
        continue;
      }
      slot.memory = slot_view(arena, tensor, bucket.begin + bucket.offsets[i]);
      view.gradients.push_back(slot.memory);
      view.parameters.push_back(tensor);
    }
  }
}

bool GradientArena::holds_partial_means() const {
  for (size_t i = 0; is_sharded_ && i < parameters_.size(); ++i) {
    if (gradients_[i].slot.reduced && lies_in(parameters_[i].tensor, gradients_[i].slot)) {
      return true;
    }
  }
  return false;
}

void GradientArena::set_layout(BucketLayout layout) {
  DDP_CHECK(!holds_partial_means(), "the buckets hold parts of means");
  const at::NoGradGuard no_grad;
  std::vector<std::pair<size_t, at::Tensor>> kept;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!specs_[i].is_sparse && lies_in(parameters_[i].tensor, gradients_[i].slot)) {
      kept.emplace_back(i, parameters_[i].tensor.grad().clone());
    }
  }
  for (auto& arena : arenas_) {
    arena.zero_();
  }
  cut(std::move(layout));
  for (const auto& [i, grad] : kept) {
    gradients_[i].slot.memory.copy_(grad);
    parameters_[i].tensor.mutable_grad() = gradients_[i].slot.memory;
  }
}

void GradientArena::shard() {
  is_sharded_ = true;
  cut(layout_);
}

void GradientArena::gather(int index, const std::vector<bool>& used) {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(communicator_->device().type());
  const auto& parameters = layout_.buckets[static_cast<size_t>(index)].parameters;
  for (const int parameter : parameters) {
    refuse_partial(parameter);
  }
  collect(parameters, used);
  for (const int parameter : parameters) {
    const auto i = static_cast<size_t>(parameter);
    if (!specs_[static_cast<size_t>(parameter)].is_sparse &&
        !parameters_[i].tensor.grad().defined() && !gradients_[i].slot.written) {
      gradients_[i].slot.memory.zero_();
    }
  }
}

void GradientArena::gather_local(std::vector<int> parameters) {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(communicator_->device().type());
  std::erase_if(parameters, [&](int parameter) {
    return ops::has_several_grad_slots(parameters_[static_cast<size_t>(parameter)].tensor);
  });
  collect(parameters, {});
}

void GradientArena::keep_apart(int parameter, bool used) {
  if (specs_[static_cast<size_t>(parameter)].is_sparse) {
    return;  // no reduction overwrites a sparse .grad
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& tensor = parameters_[static_cast<size_t>(parameter)].tensor;
  auto& gradient = gradients_[static_cast<size_t>(parameter)];
  if ((!used || ops::has_several_grad_slots(tensor)) && lies_in(tensor, gradient.slot)) {
    tensor.mutable_grad() = tensor.grad().clone();
    gradient.is_apart = true;
  }
}

// Copies and casts gradients from .grad into their slots with one _foreach_copy_. If a fused op
// already wrote a slot, .grad is added to it. Then .grad points to the slot, unless another reducer
// may still have to copy the gradient, or the parameter takes no part and may have to keep it.
void GradientArena::collect(const std::vector<int>& indices, const std::vector<bool>& used) {
  const auto device = communicator_->device();
  std::vector<at::Tensor> copy_to, copy_from, add_to, add_from;
  for (const int index : indices) {
    const auto& parameter = parameters_[static_cast<size_t>(index)];
    auto& gradient = gradients_[static_cast<size_t>(index)];
    auto& slot = gradient.slot;
    at::Tensor& grad = parameter.tensor.mutable_grad();
    const ops::GradSlot* held = slot_holding_grad(parameter.tensor, slot);
    if (held == nullptr && !gradient.is_apart) {
      gradient.set_aside = at::Tensor();  // zero_grad() dropped .grad with the mean
    }
    if (!grad.defined() && !slot.written) {
      continue;
    }
    slot.reduced = held != nullptr ? held->reduced : gradient.is_apart && slot.reduced;
    if (specs_[static_cast<size_t>(index)].is_sparse) {
      continue;
    }
    if (grad.defined() && !aliases(grad, slot.memory)) {
      if (slot.written && slot.stream) {
        wait_for(*slot.stream, current_stream(device));
      }
      (slot.written ? add_to : copy_to).push_back(slot.memory);
      (slot.written ? add_from : copy_from).push_back(grad);
    }
    clear_writes(slot);
    const bool is_used = used.empty() || used[static_cast<size_t>(index)];
    if (!is_used || ops::has_several_grad_slots(parameter.tensor)) {
      keep_apart(index, is_used);
    } else {
      grad = slot.memory;
    }
  }
  if (!copy_to.empty()) {
    at::_foreach_copy_(copy_to, copy_from);
  }
  if (!add_to.empty()) {
    at::_foreach_add_(add_to, add_from);
  }
}

// With ZeRO-1 a rank has only its part of the mean, so another backward cannot add to it.
void GradientArena::refuse_partial(int parameter) const {
  const auto& [name, tensor] = parameters_[static_cast<size_t>(parameter)];
  const auto* held = slot_holding_grad(tensor, gradients_[static_cast<size_t>(parameter)].slot);
  if (held != nullptr && held->is_sharded && held->reduced) {
    throw SettingsError(
        "with optimizer.zero1=true the gradient of " + name +
        " from the previous synchronised backward is reduced only in this rank's part, so nothing "
        "can be added to it; fix: call zero_grad() or the optimizer's step before the next "
        "backward, and run all but the last backward of a step under no_sync()");
  }
}

void GradientArena::publish(const std::vector<bool>& used) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& gradient = gradients_[i];
    const bool is_used = used.empty() || used[i];
    const bool was_apart = std::exchange(gradient.is_apart, false);
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    if (was_apart && grad.defined()) {
      if (!is_used) {
        gradient.slot.memory.copy_(grad);
      }
      use_until_freed(grad);  // a hook's stream made it, and streams of reductions read it
    }
    if (was_apart || is_used) {
      grad = gradient.slot.memory;
    }
    gradient.slot.reduced = gradient.slot.reduced || is_used;
    gradient.slot.added_to = gradient.slot.added_to && !is_used;
    gradient.slot.written = false;
  }
}

void GradientArena::forget_writes() {
  for (auto& gradient : gradients_) {
    clear_writes(gradient.slot);
  }
}

void GradientArena::set_reduced_aside(bool are_added) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    auto& [slot, set_aside, is_apart] = gradients_[i];
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    const ops::GradSlot* held = slot_holding_grad(parameters_[i].tensor, slot);
    if (held != nullptr && held->reduced && !set_aside.defined()) {
      if (are_added || held->added_to || slot.written) {
        throw SettingsError(
            "the divisor of a join may change, and gradients of this backward or of backward() "
            "under no_sync() are added to means of an earlier one; fix: call zero_grad() after "
            "each optimizer step, or keep JoinOptions::divide_by_initial_world_size=true");
      }
      refuse_partial(static_cast<int>(i));
      set_aside = grad.clone();
      slot.memory.zero_();
      slot.reduced = true;
      grad = slot.memory;  // from another reducer's slot too
    }
  }
}

void GradientArena::add_set_aside() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    auto& gradient = gradients_[i];
    const at::Tensor mean = std::exchange(gradient.set_aside, at::Tensor());
    if (mean.defined() && specs_[i].is_sparse) {
      gradient.slot.memory = (gradient.slot.memory + mean).coalesce();
      at::Tensor& grad = parameters_[i].tensor.mutable_grad();
      grad = grad.defined() ? gradient.slot.memory : grad;
    } else if (mean.defined()) {
      gradient.slot.memory.add_(mean);
      use_until_freed(mean);
      if (gradient.is_apart && parameters_[i].tensor.grad().defined()) {
        parameters_[i].tensor.mutable_grad().add_(mean);
      }
    }
  }
}

std::vector<GradientArena::Saved> GradientArena::save(bool copies) const {
  const at::NoGradGuard no_grad;
  std::vector<Saved> saved;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const auto& gradient = gradients_[i];
    // A later reduction writes other memory than that of a sparse mean.
    const bool is_copied =
        copies && !specs_[i].is_sparse && lies_in(parameters_[i].tensor, gradient.slot);
    saved.push_back({.grad = parameters_[i].tensor.grad(),
                     .slot_values = is_copied ? parameters_[i].tensor.grad().clone() : at::Tensor(),
                     .set_aside = gradient.set_aside,
                     .slot = gradient.slot});
  }
  return saved;
}

void GradientArena::restore(const std::vector<Saved>& saved) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    auto& gradient = gradients_[i];
    const auto& kept = saved[i];
    at::Tensor memory = gradient.slot.memory;  // the layout may have changed
    gradient = {.slot = kept.slot, .set_aside = kept.set_aside};
    if (specs_[i].is_sparse) {
      memory = kept.slot.memory;
    } else if (kept.slot_values.defined()) {
      memory.copy_(kept.slot_values);
    }
    gradient.slot.memory = memory;
    gradient.slot.is_sharded = is_sharded_;
    parameters_[i].tensor.mutable_grad() = kept.slot_values.defined() ? memory : kept.grad;
  }
}

void GradientArena::drop() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    parameters_[i].tensor.mutable_grad() = at::Tensor();
    gradients_[i].slot.reduced = false;
    gradients_[i].slot.added_to = false;
    gradients_[i].is_apart = false;
    gradients_[i].set_aside = at::Tensor();
  }
  forget_writes();
}

}  // namespace ddp::detail
