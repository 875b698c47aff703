// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/reducer.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <tuple>
#include <utility>

#include "ddp/core/error.hpp"
#include "reduce/reducer_impl.hpp"
#include "reduce/replica_sync.hpp"
#include "reduce/sharded_gradient.hpp"

namespace ddp {
namespace {

at::ScalarType grad_dtype(const at::Tensor& parameter, const DdpOptions& options) {
  const auto leaf = parameter.scalar_type();
  const bool is_half = leaf == at::kHalf || leaf == at::kBFloat16;
  return is_half && options.fp32_grads ? at::kFloat : leaf;
}

// The parameter's own strides where they are dense (channels_last stays channels_last), so that
// copies between gradient and slot are linear.
at::Tensor slot_view(const at::Tensor& arena, const at::Tensor& parameter, int64_t offset) {
  // Autograd must not know it for a view: torch::optim's zero_grad(false) calls detach_ on .grad.
  const at::AutoDispatchBelowADInplaceOrView no_view_tracking;
  if (parameter.is_non_overlapping_and_dense()) {
    return arena.as_strided(parameter.sizes(), parameter.strides(), offset);
  }
  return arena.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

}  // namespace

Reducer::Impl::Impl(NamedParameters parameters_in, CommunicatorPtr communicator_in,
                    const DdpOptions& options_in)
    : communicator(std::move(communicator_in)),
      options(options_in),
      hook(make_comm_hook(options_in)),
      named_parameters(std::move(parameters_in)),
      buffer_broadcast(communicator),
      model_id(communicator->launch_sequencer().register_model()) {
  std::map<std::tuple<at::ScalarType, at::ScalarType>, int> keys;
  for (const auto& [name, tensor] : named_parameters) {
    if (tensor.device() != device()) {
      throw SettingsError(detail::concat("parameter ", name, " is on ", tensor.device(),
                                         " but the communicator works on ", device(),
                                         ": move the module there before wrapping it"));
    }
    const auto dtype = grad_dtype(tensor, options);
    const auto [found, inserted] =
        keys.try_emplace({tensor.scalar_type(), dtype}, static_cast<int>(keys.size()));
    specs.push_back({.numel = tensor.numel(),
                     .element_bytes = static_cast<int64_t>(c10::elementSize(dtype)),
                     .key = found->second});
    Parameter parameter;
    parameter.name = name;
    parameter.tensor = tensor;
    parameter.key = found->second;
    parameters.push_back(std::move(parameter));
    if (inserted) {
      arenas.push_back(at::empty({0}, tensor.options().dtype(dtype)));  // dtype only, see below
    }
  }
  reachable.assign(parameters.size(), true);
  allocate_arena();
  // Before the ready order is known one bucket a key; find_unused_parameters never rebuilds.
  const bool unbounded = !options.find_unused_parameters || options.static_graph;
  install_layout(assign_buckets(
      specs, {.limits_bytes = unbounded ? std::vector<int64_t>{} : bucket_limits_bytes(options),
              .world_size = communicator->world_size()}));
  for (const auto& state : buckets) {
    initial_bucket_bytes.push_back(static_cast<int64_t>(state.bucket.buffer.nbytes()));
  }
  install_hooks();
}

Reducer::Impl::~Impl() {
  communicator->launch_sequencer().end_pass(model_id);
  for (auto& parameter : parameters) {
    parameter.accumulator->del_post_hook(parameter.hook_key);
    ops::set_grad_slot(parameter.tensor, nullptr);
  }
}

// Once: later layouts move offsets inside this memory, so that its address, and with it a window
// registered with NCCL or a captured graph, stays valid.
void Reducer::Impl::allocate_arena() {
  // Chosen buckets may be as small as one parameter.
  const BucketLayoutOptions limits{.limits_bytes = chooses_buckets(options)
                                                       ? std::vector<int64_t>{1}
                                                       : bucket_limits_bytes(options),
                                   .world_size = communicator->world_size()};
  for (size_t key = 0; key < arenas.size(); ++key) {
    const auto dtype = arenas[key].scalar_type();
    const int64_t numel = max_arena_numel(specs, limits, static_cast<int>(key));
    const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    arenas[key] = communicator->allocate(bytes).view(dtype);
    arenas[key].zero_();  // padding between gradients is reduced too and stays zero
  }
  used_map = at::zeros({static_cast<int64_t>(parameters.size())},
                       at::TensorOptions().dtype(at::kInt).device(device()));
  weight_sum = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device()));
}

void Reducer::Impl::install_layout(BucketLayout new_layout) {
  layout = std::move(new_layout);
  buckets.clear();
  buckets.resize(layout.buckets.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    const Bucket& bucket = layout.buckets[b];
    const at::Tensor& arena = arenas[static_cast<size_t>(bucket.key)];
    auto& view = buckets[b].bucket;
    view.index = static_cast<int>(b);
    view.is_last = b + 1 == buckets.size();
    view.buffer = arena.narrow(0, bucket.begin, bucket.numel);
    buckets[b].buffer = view.buffer;
    const int64_t part = shards ? bucket.numel / communicator->world_size() : bucket.numel;
    view.shard = view.buffer.narrow(0, shards ? part * communicator->rank() : 0, part);
    view.communicator = communicator.get();
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      auto& parameter = parameters[static_cast<size_t>(bucket.parameters[i])];
      parameter.slot = {.memory =
                            slot_view(arena, parameter.tensor, bucket.begin + bucket.offsets[i])};
      if (shards) {
        detail::mark_sharded_gradient(parameter.slot.memory);
      }
      ops::set_grad_slot(parameter.tensor, &parameter.slot);
      view.gradients.push_back(parameter.slot.memory);
      view.parameters.push_back(parameter.tensor);
    }
  }
  scheduler.reset(layout);
}

void Reducer::Impl::install_hooks() {
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& parameter = parameters[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    accumulator_index[parameter.accumulator.get()] = static_cast<int>(i);
    parameter.hook_key = parameter.accumulator->add_post_hook(
        std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, i](const auto& outputs, const auto& /*inputs*/) {
              on_gradient(static_cast<int>(i));
              return outputs;
            }));
  }
}

// Hooks may be registered until the first forward, long after the settings were compared; ranks
// with different ones would meet in different collectives.
void Reducer::Impl::compare_hooks() {
  if (std::exchange(hooks_compared, true) || communicator->world_size() == 1) {
    return;
  }
  const auto names = detail::all_gather_text(*communicator, hook ? hook->name() : "none");
  for (size_t rank = 1; rank < names.size(); ++rank) {
    if (names[rank] != names[0]) {
      throw MismatchError(detail::concat("the ranks reduce with different comm hooks: rank ", rank,
                                         " has \"", names[rank], "\", rank 0 has \"", names[0],
                                         "\". Register the same hook on every rank"));
    }
  }
}

Reducer::Reducer(NamedParameters parameters, CommunicatorPtr communicator,
                 const DdpOptions& options)
    : impl_(std::make_unique<Impl>(std::move(parameters), std::move(communicator), options)) {}
Reducer::~Reducer() = default;

void Reducer::send_buffers(const std::vector<at::Tensor>& buffers) {
  const std::lock_guard lock(impl_->mutex);
  impl_->buffer_broadcast.start(buffers, /*root=*/0);
  impl_->buffers_sent = true;
}

bool Reducer::take_sent_buffers() {
  const std::lock_guard lock(impl_->mutex);
  impl_->buffer_broadcast.finish();
  return std::exchange(impl_->buffers_sent, false);
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  impl_->prepare(outputs);
}

void Reducer::begin_forward() {
  const std::lock_guard lock(impl_->mutex);
  impl_->check_previous_pass();
  impl_->compare_hooks();
  if (impl_->rebuild_is_due()) {
    impl_->rebuild();
  }
}

void Reducer::register_comm_hook(std::shared_ptr<CommHook> hook) {
  const std::lock_guard lock(impl_->mutex);
  if (hook == nullptr) {
    throw SettingsError(
        "register_comm_hook: the hook is null; leave the call out, and the reducer all-reduces by "
        "itself");
  }
  if (impl_->hook) {
    throw SettingsError("a comm hook is set already (" + impl_->hook->name() +
                        "): only one is allowed");
  }
  if (impl_->shards) {
    throw SettingsError(
        "register_comm_hook: with optimizer.zero1=true each rank reduces its part "
        "of the gradients, which hooks cannot; set optimizer.zero1=false");
  }
  if (impl_->hooks_compared || impl_->num_passes > 0) {
    throw SettingsError("register_comm_hook must be called before the first forward, on all ranks");
  }
  impl_->hook = std::move(hook);
}

void Reducer::shard_gradients() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->hook) {
    throw SettingsError("optimizer.zero1=true: gradients are reduced by the comm hook " +
                        impl_->hook->name() +
                        ", which knows nothing of parts: set ddp.comm_hook=none");
  }
  if (impl_->shards) {
    throw SettingsError("optimizer.zero1=true: the model has such an optimizer already");
  }
  DDP_CHECK(impl_->num_passes == 0, "gradients were reduced whole already");
  impl_->shards = true;
  impl_->install_layout(impl_->layout);
}

bool Reducer::shards_gradients() const {
  return impl_->shards;
}

bool Reducer::has_open_forward() {
  const std::lock_guard lock(impl_->mutex);
  impl_->forget_ended_forwards();
  return !impl_->open_forwards.empty();
}

void Reducer::add_weight(double count) {
  const std::lock_guard lock(impl_->mutex);
  impl_->set_reduced_aside();
  impl_->weight += count;
  impl_->is_weighted = true;
}

void Reducer::add_weight(const at::Tensor& count) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(impl_->mutex);
  impl_->set_reduced_aside();
  auto& sum = impl_->device_weight;
  const auto added = count.detach().to(at::kFloat).reshape({1});
  sum = sum.defined() ? sum + added : added;
  impl_->weight_stream = detail::current_stream(impl_->device());
  impl_->is_weighted = true;
}

Reducer::Counts Reducer::counts() const {
  const std::lock_guard lock(impl_->mutex);
  return {impl_->weight, impl_->device_weight, impl_->is_weighted};
}

void Reducer::restore_counts(const Counts& counts) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->backward_threw()) {
    return;  // its reductions need the counts until join_broken_backward()
  }
  if (!counts.is_weighted) {
    impl_->add_set_aside();
  }
  impl_->weight = counts.host;
  impl_->device_weight = counts.device;
  impl_->is_weighted = counts.is_weighted;
}

void Reducer::set_divisor(double divisor) {
  const std::lock_guard lock(impl_->mutex);
  if (divisor != 0 && divisor != impl_->communicator->world_size()) {
    impl_->set_reduced_aside();
  }
  impl_->divisor = divisor;
}

void Reducer::require_weight(bool on) {
  const std::lock_guard lock(impl_->mutex);
  impl_->requires_weight = on;
}

void Reducer::note_local_forward() {
  const std::lock_guard lock(impl_->mutex);
  impl_->note_local_forward();
}

void Reducer::shadow_backward() {
  impl_->shadow();
}

const BucketLayout& Reducer::layout() const {
  return impl_->layout;
}

void Reducer::add_layout_listener(
    std::function<void(const BucketLayout&, const BucketLayout&)> listener) {
  impl_->layout_listeners.push_back(std::move(listener));
}

const NamedParameters& Reducer::parameters() const {
  return impl_->named_parameters;
}

at::Tensor Reducer::bucket_buffer(int index) const {
  return impl_->buckets.at(static_cast<size_t>(index)).bucket.buffer;
}

at::Tensor Reducer::bucket_shard(int index) const {
  return impl_->buckets.at(static_cast<size_t>(index)).bucket.shard;
}

double Reducer::exposed_communication_ms() {
  const std::lock_guard lock(impl_->mutex);
  return detail::TimeMark::milliseconds(impl_->exposed_begin, impl_->exposed_end);
}

void Reducer::record_forward_start() {
  const std::lock_guard lock(impl_->mutex);
  impl_->measurement_decided = false;  // a forward without backward before it does not count
  impl_->decide_measurement();
  if (impl_->is_measured) {
    impl_->forward_start.record(impl_->device());
  }
}

DdpLoggingData Reducer::logging_data() {
  const std::lock_guard lock(impl_->mutex);
  return impl_->logging_data();
}

}  // namespace ddp
