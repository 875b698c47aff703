// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/data_parallel_model.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "core/launch/place_in_loop.hpp"
#include "core/launch/training_state.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/join.hpp"
#include "ddp/reduce/model_summary.hpp"
#include "reduce/model/join_scope.hpp"
#include "reduce/model/model_parts.hpp"
#include "reduce/model/replica_check.hpp"
#include "reduce/model/replica_sync.hpp"
#include "reduce/sparse_gradients.hpp"

namespace ddp {
namespace {

NamedParameters without_ignored(NamedParameters tensors, const std::vector<std::string>& ignored) {
  std::erase_if(tensors, [&](const NamedParameter& entry) {
    return std::find(ignored.begin(), ignored.end(), entry.name) != ignored.end();
  });
  return tensors;
}

NamedParameters trainable(const NamedParameters& tensors) {
  NamedParameters result;
  for (const auto& entry : tensors) {
    if (entry.tensor.requires_grad()) {
      result.push_back(entry);
    }
  }
  return result;
}

std::vector<at::Tensor> tensors_only(const NamedParameters& named) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(named.size());
  for (const auto& entry : named) {
    tensors.push_back(entry.tensor);
  }
  return tensors;
}

void check_ignored_names(const ModelTensors& tensors, const DdpOptions& options) {
  for (const auto& name : options.parameters_to_ignore) {
    const auto matches = [&](const NamedParameter& entry) { return entry.name == name; };
    if (std::none_of(tensors.parameters.begin(), tensors.parameters.end(), matches) &&
        std::none_of(tensors.buffers.begin(), tensors.buffers.end(), matches)) {
      throw SettingsError("ddp.parameters_to_ignore names " + name +
                          ", which is not a parameter or buffer of the module");
    }
  }
}

void backward_with_count(Reducer& reducer, const JoinScope* join, bool trains,
                         const at::Tensor& loss_sum,
                         const std::function<void(detail::WeightedMean&)>& add_count) {
  if (!trains) {
    throw SettingsError(
        "weighted_backward of a model whose parameters are all frozen: the count would divide "
        "nothing; fix: call it on the model that trains, or call loss_sum.backward()");
  }
  if (!loss_sum.defined() || !loss_sum.requires_grad()) {
    throw SettingsError(
        "weighted_backward: loss_sum requires no gradient; fix: compute it from the model's "
        "output. "
        "A rank without samples runs forward on an empty batch, or adds 0 * output.sum()");
  }
  if (join != nullptr && !join->is_weighted()) {
    throw SettingsError(
        "weighted_backward inside a join needs JoinOptions::weighted=true, because ranks that ran "
        "out "
        "add a weight of 0");
  }
  reducer.run_weighted(loss_sum, add_count);
}

// The synchronised forward decided whether its backward is reduced. Freezing after that forward
// changes nothing.
bool is_trained(const DataParallelModel& model, const detail::FrozenParameters& frozen) {
  if (model.require_backward_grad_sync()) {
    return !frozen.covers_all();
  }
  const auto& parameters = model.trained_parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const auto& entry) { return entry.tensor.requires_grad(); });
}

bool sends_buffers_in_training(const DataParallelModel& model) {
  return model.is_training() && model.communicator()->world_size() > 1 &&
         model.options().broadcast_buffers == BroadcastBuffers::EachForward;
}

}  // namespace

std::optional<detail::BufferBroadcast::State> detail::deciding_buffer_state(
    const DataParallelModel& model) {
  const auto& buffers = model.reducer().buffers();
  return sends_buffers_in_training(model) && buffers.has_buffers() ? std::optional(buffers.state())
                                                                   : std::nullopt;
}

DataParallelModel::DataParallelModel(ModelTensors tensors, CommunicatorPtr communicator,
                                     const DdpOptions& options)
    : parts_(std::make_unique<Parts>(
          Parts{.tensors = tensors,
                .state = {tensors, options.parameters_to_ignore, communicator->world_size() > 1},
                .communicator = std::move(communicator),
                .options = options})) {
  options.usage.set();
  auto& own = parts_->tensors;
  check_ignored_names(own, options);
  own.parameters = without_ignored(std::move(own.parameters), options.parameters_to_ignore);
  own.buffers = without_ignored(std::move(own.buffers), options.parameters_to_ignore);
  // This precedes any other collective: ranks whose models differ must not broadcast.
  detail::check_equal_across_ranks(*parts_->communicator, own, options);
  detail::check_supported(own);
  auto trained = trainable(own.parameters);
  const auto sparse = detail::find_sparse(trained, own, options);
  if (trained.empty()) {
    throw SettingsError(
        "DistributedDataParallel needs a parameter that requires a gradient, and this module has "
        "none; fix: call it without the wrapper");
  }
  if (options.init_sync) {
    sync_module_states();
  }
  parts_->frozen = std::make_unique<detail::FrozenParameters>(own.parameters, parts_->communicator,
                                                              options.static_graph);
  parts_->reducer =
      std::make_unique<Reducer>(std::move(trained), parts_->communicator, options, sparse);
  parts_->reducer->guard().replicas() = detail::make_replica_check(
      own.parameters, parts_->communicator, options, detail::of_model(options));
  if (options.seed_ranks) {
    detail::seed_ranks_differently(parts_->communicator->rank());
  }
  if (options.logs_summary && parts_->communicator->rank() == 0) {
    const auto text = model_summary(*this);
    log_info("summary" + detail::of_model(options) + "\n" + text.substr(0, text.size() - 1));
  }
}

DataParallelModel::DataParallelModel(DataParallelModel&&) noexcept = default;
DataParallelModel::~DataParallelModel() = default;

NoSync::NoSync(DataParallelModel& model) : depth_(&model.parts_->no_sync_depth) {
  ++*depth_;
}

const CommunicatorPtr& DataParallelModel::communicator() const {
  return parts_->communicator;
}

const DdpOptions& DataParallelModel::options() const {
  return parts_->options;
}

bool DataParallelModel::is_training() const {
  const auto& is_training = parts_->tensors.is_training;
  return !is_training || is_training();
}

bool DataParallelModel::require_backward_grad_sync() const {
  return parts_->no_sync_depth == 0;
}

bool DataParallelModel::is_joining() const {
  return parts_->join != nullptr;
}

Reducer& DataParallelModel::reducer() const {
  return *parts_->reducer;
}

const NamedParameters& DataParallelModel::named_parameters() const {
  return parts_->state.tensors().parameters;
}

std::vector<at::Tensor> DataParallelModel::parameters() const {
  return tensors_only(named_parameters());
}

const NamedParameters& DataParallelModel::trained_parameters() const {
  return parts_->reducer->gradients().parameters();
}

const ModelTensors& detail::all_tensors(const DataParallelModel& model) {
  return model.parts_->state.tensors();
}

detail::Listeners& detail::exact_sync_listeners(const DataParallelModel& model) {
  return model.parts_->exact_sync_listeners;
}

detail::Listeners& detail::join_listeners(const DataParallelModel& model) {
  return model.parts_->join_listeners;
}

NamedParameters DataParallelModel::named_buffers() const {
  return parts_->tensors.read_buffers
             ? without_ignored(parts_->tensors.read_buffers(), parts_->options.parameters_to_ignore)
             : parts_->tensors.buffers;
}

double DataParallelModel::exposed_communication_ms() {
  return parts_->reducer->timing().exposed_ms();
}

DdpLoggingData DataParallelModel::logging_data() {
  return parts_->reducer->logging_data();
}

void DataParallelModel::zero_grad() {
  for (const auto& entry : named_parameters()) {
    entry.tensor.mutable_grad() = at::Tensor();
  }
}

void DataParallelModel::register_comm_hook(std::shared_ptr<CommHook> hook) {
  parts_->reducer->register_comm_hook(std::move(hook));
}

void DataParallelModel::sync_module_states(int root, bool exactly) {
  if (parts_->reducer) {
    parts_->reducer->finish_pending();
  }
  auto tensors = tensors_only(parts_->tensors.parameters);
  const auto buffers = tensors_only(named_buffers());
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  detail::broadcast_coalesced(*parts_->communicator, tensors, root);
  if (exactly) {
    parts_->exact_sync_listeners.notify();
  }
}

void DataParallelModel::sync_buffers(int root) {
  // A pending broadcast would overwrite these buffers.
  parts_->reducer->finish_pending();
  detail::broadcast_coalesced(*parts_->communicator, tensors_only(named_buffers()), root);
}

void DataParallelModel::before_forward() {
  detail::record_phase(at::GradMode::is_enabled() ? "forward" : "evaluation");
  if (at::GradMode::is_enabled()) {
    detail::record_training_state();
    parts_->reducer->join_broken_backward();
  }
  // An evaluation between forward and backward reads buffers too.
  parts_->reducer->finish_pending();
  const bool synchronised = at::GradMode::is_enabled() && require_backward_grad_sync();
  auto& buffers = parts_->reducer->buffers();
  const bool sends_buffers =
      sends_buffers_in_training(*this) && buffers.state().is_required && !buffers.take_sent();
  if (synchronised) {
    // Before a join or the frozen set finds a consequence.
    parts_->reducer->guard().check_complete();
    parts_->update_frozen();
  }
  const bool reduces = synchronised && !parts_->frozen->covers_all();
  if (parts_->join != nullptr) {
    parts_->join->announce_forward(reduces, sends_buffers);
  }
  if (reduces) {
    parts_->reducer->begin_forward();
    parts_->reducer->timing().begin_forward();
  }
  if (sends_buffers) {
    sync_buffers(parts_->join != nullptr ? parts_->join->buffer_root() : 0);
  }
}

void DataParallelModel::after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known,
                                      const char* output_type) {
  detail::report_step(at::GradMode::is_enabled() ? detail::kTrainingForward
                                                 : detail::kEvaluationForward);
  const bool synchronised = at::GradMode::is_enabled() && require_backward_grad_sync();
  if (synchronised && !outputs_known && parts_->options.find_unused_parameters) {
    throw SettingsError(concat(
        "ddp.find_unused_parameters=true needs the tensors in the forward's result, but does not "
        "know the type ",
        output_type, ": ", detail::kDefineForEachTensor));
  }
  // Only training forwards decide whether the next one sends buffers, because all ranks run the
  // same ones. A rank that evaluates alone must still match the others.
  if (sends_buffers_in_training(*this)) {
    parts_->reducer->buffers().set_required(synchronised);
  }
  const bool reduces = synchronised && !parts_->frozen->covers_all();
  // Sends the next training forward's buffers during this one's backward. In a join the next
  // forward sends them, because ranks without inputs answer forwards only.
  if (reduces && parts_->join == nullptr && sends_buffers_in_training(*this) &&
      !parts_->reducer->reductions().are_rehearsed()) {
    parts_->reducer->buffers().start(tensors_only(named_buffers()), /*root=*/0);
  }
  if (reduces) {
    parts_->reducer->prepare_for_backward(outputs);
  } else if (at::GradMode::is_enabled()) {
    parts_->reducer->record_local_forward(outputs);
  }
}

void DataParallelModel::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  if (at::GradMode::is_enabled() && require_backward_grad_sync()) {
    detail::report_step(detail::kTrainingForward);
    parts_->reducer->join_broken_backward();
    parts_->reducer->guard().check_complete();
    parts_->update_frozen();
    const bool reduces = !parts_->frozen->covers_all();
    if (parts_->join != nullptr) {
      parts_->join->announce_forward(reduces, false);
    }
    if (reduces) {
      parts_->reducer->begin_forward();
      parts_->reducer->prepare_for_backward(outputs);
    }
  }
}

void DataParallelModel::weighted_backward(const at::Tensor& loss_sum, double count) {
  if (!(count >= 0 && std::isfinite(count))) {
    throw SettingsError(
        concat("weighted_backward: count=", count,
               " must be 0 or more and finite; fix: give the number of items in loss_sum"));
  }
  backward_with_count(*parts_->reducer, parts_->join, is_trained(*this, *parts_->frozen), loss_sum,
                      [&](auto& mean) { mean.add(count); });
}

void DataParallelModel::weighted_backward(const at::Tensor& loss_sum, const at::Tensor& count) {
  const auto device = parts_->communicator->device();
  if (!count.defined() || count.numel() != 1 || count.device() != device) {
    throw SettingsError(
        concat("weighted_backward: the count is ",
               count.defined() ? concat("a ", count.scalar_type(), " tensor of shape ",
                                        count.sizes(), " on ", count.device())
                               : "an undefined tensor",
               "; fix: give one element on ", device, ", or the number itself as a double"));
  }
  backward_with_count(*parts_->reducer, parts_->join, is_trained(*this, *parts_->frozen), loss_sum,
                      [&](auto& mean) { mean.add(count); });
}

void DataParallelModel::leave_frozen_out_of_state() {
  parts_->state.leave_frozen_out();
}

std::string DataParallelModel::compute_frozen_fingerprint() const {
  return parts_->state.compute_frozen_fingerprint();
}

const std::string& DataParallelModel::frozen_fingerprint() const {
  return parts_->state.frozen_fingerprint();
}

StateDict DataParallelModel::state_dict() const {
  parts_->reducer->guard().check_used();
  parts_->reducer->finish_pending();
  return parts_->state.save();
}

void DataParallelModel::load_state_dict(const StateDict& state) {
  parts_->reducer->finish_pending();  // else pending buffers would overwrite the loaded ones
  parts_->state.load(state);
}

}  // namespace ddp
