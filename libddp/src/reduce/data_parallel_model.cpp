// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/data_parallel_model.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "ddp/core/state_dict.hpp"
#include "ddp/ops/overwritten.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/join.hpp"
#include "reduce/join_scope.hpp"
#include "reduce/model_state.hpp"
#include "reduce/reducer.hpp"
#include "reduce/replica_sync.hpp"

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

void backward_with_count(Reducer& reducer, const JoinScope* join, const at::Tensor& loss_sum,
                         const std::function<void()>& add_count) {
  if (join != nullptr && !join->is_weighted()) {
    throw SettingsError(
        "weighted_backward inside a join needs JoinOptions::weighted=true, because ranks that ran "
        "out "
        "add a weight of 0");
  }
  const auto counts_before = reducer.mean().counts();
  add_count();
  try {
    loss_sum.backward();
  } catch (...) {
    reducer.restore_counts(counts_before);  // else the next backward would divide by them too
    throw;
  }
}

bool sends_buffers_in_training(const DataParallelModel& model) {
  return model.is_training() && model.communicator()->world_size() > 1 &&
         model.options().broadcast_buffers == BroadcastBuffers::EachForward;
}

}  // namespace

DataParallelModel::DataParallelModel(ModelTensors tensors, CommunicatorPtr communicator,
                                     const DdpOptions& options)
    : tensors_(tensors),
      state_(std::make_unique<detail::ModelState>(std::move(tensors), options.parameters_to_ignore,
                                                  communicator->world_size() > 1)),
      communicator_(std::move(communicator)),
      options_(options) {
  options.taken.set();
  check_ignored_names(tensors_, options_);
  tensors_.parameters =
      without_ignored(std::move(tensors_.parameters), options_.parameters_to_ignore);
  tensors_.buffers = without_ignored(std::move(tensors_.buffers), options_.parameters_to_ignore);
  // This precedes any other collective: ranks whose models differ must not broadcast.
  detail::check_equal_across_ranks(*communicator_, tensors_, options_);
  detail::check_supported(tensors_);
  auto trained = trainable(tensors_.parameters);
  if (trained.empty()) {
    throw SettingsError(
        "DistributedDataParallel needs a parameter that requires a gradient, and this module has "
        "none; fix: call it without the wrapper");
  }
  if (options_.init_sync) {
    sync_module_states();
  }
  reducer_ = std::make_unique<Reducer>(std::move(trained), communicator_, options_);
}

DataParallelModel::~DataParallelModel() = default;

const NamedParameters& DataParallelModel::named_parameters() const {
  return reducer_->gradients().parameters();
}

const ModelTensors& DataParallelModel::all_tensors() const {
  return state_->tensors();
}

NamedParameters DataParallelModel::named_buffers() const {
  return tensors_.read_buffers
             ? without_ignored(tensors_.read_buffers(), options_.parameters_to_ignore)
             : tensors_.buffers;
}

double DataParallelModel::exposed_communication_ms() {
  return reducer_->timing().exposed_ms();
}

DdpLoggingData DataParallelModel::logging_data() {
  return reducer_->logging_data();
}

void DataParallelModel::zero_grad() {
  for (const auto& entry : named_parameters()) {
    entry.tensor.mutable_grad() = at::Tensor();
  }
}

void DataParallelModel::register_comm_hook(std::shared_ptr<CommHook> hook) {
  reducer_->register_comm_hook(std::move(hook));
}

void DataParallelModel::sync_module_states(int root, bool exactly) {
  if (reducer_) {
    reducer_->finish_pending();
  }
  auto tensors = tensors_only(tensors_.parameters);
  const auto buffers = tensors_only(named_buffers());
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  detail::broadcast_coalesced(*communicator_, tensors, root);
  for (const auto& entry : tensors_.parameters) {
    ops::overwritten(entry.tensor, exactly);
  }
}

void DataParallelModel::sync_buffers(int root) {
  // A pending broadcast would overwrite these buffers.
  reducer_->finish_pending();
  detail::broadcast_coalesced(*communicator_, tensors_only(named_buffers()), root);
}

void DataParallelModel::before_forward() {
  if (at::GradMode::is_enabled()) {
    reducer_->join_broken_backward();
  }
  // An evaluation between forward and backward reads buffers too.
  reducer_->finish_pending();
  const bool synchronised = at::GradMode::is_enabled() && sync_;
  const bool sends_buffers =
      sends_buffers_in_training(*this) && require_buffer_sync_ && !reducer_->buffers().take_sent();
  if (join_ != nullptr) {
    join_->announce_forward(synchronised, sends_buffers);
  }
  if (synchronised) {
    reducer_->begin_forward();
    reducer_->timing().begin_forward();
  }
  if (sends_buffers) {
    sync_buffers(join_ != nullptr ? join_->buffer_root() : 0);
  }
}

void DataParallelModel::after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known,
                                      const char* output_type) {
  if (!outputs_known && options_.find_unused_parameters) {
    throw SettingsError(concat(
        "ddp.find_unused_parameters=true needs the tensors in the forward's result, but does not "
        "know the type ",
        output_type, ": ", detail::kDefineForEachTensor));
  }
  const bool synchronised = at::GradMode::is_enabled() && sync_;
  // Only training forwards decide whether the next one sends buffers, because all ranks run the
  // same ones. A rank that evaluates alone must still match the others.
  if (is_training()) {
    require_buffer_sync_ = synchronised;
  }
  // Sends the next training forward's buffers during this one's backward. In a join the next
  // forward sends them, because ranks without inputs answer forwards only.
  if (synchronised && join_ == nullptr && sends_buffers_in_training(*this)) {
    reducer_->buffers().start(tensors_only(named_buffers()), /*root=*/0);
  }
  if (synchronised) {
    reducer_->prepare_for_backward(outputs);
  } else if (at::GradMode::is_enabled()) {
    reducer_->note_local_forward();
  }
}

void DataParallelModel::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  if (at::GradMode::is_enabled() && sync_) {
    reducer_->join_broken_backward();
    if (join_ != nullptr) {
      join_->announce_forward(true, false);
    }
    reducer_->begin_forward();
    reducer_->prepare_for_backward(outputs);
  }
}

void DataParallelModel::weighted_backward(const at::Tensor& loss_sum, double count) {
  if (!(count >= 0)) {
    throw SettingsError(concat("weighted_backward: count=", count,
                               " must be 0 or more; fix: give the number of items in loss_sum"));
  }
  backward_with_count(*reducer_, join_, loss_sum, [&] { reducer_->mean().add(count); });
}

void DataParallelModel::weighted_backward(const at::Tensor& loss_sum, const at::Tensor& count) {
  const auto device = communicator_->device();
  if (!count.defined() || count.numel() != 1 || count.device() != device) {
    throw SettingsError(
        concat("weighted_backward: the count is ",
               count.defined() ? concat("a ", count.scalar_type(), " tensor of shape ",
                                        count.sizes(), " on ", count.device())
                               : "an undefined tensor",
               "; fix: give one element on ", device, ", or the number itself as a double"));
  }
  backward_with_count(*reducer_, join_, loss_sum, [&] { reducer_->mean().add(count); });
}

void DataParallelModel::leave_frozen_out_of_state() {
  state_->leave_frozen_out();
}

std::string DataParallelModel::frozen_fingerprint() const {
  return state_->frozen_fingerprint();
}

const std::string& DataParallelModel::frozen_identity() const {
  return state_->frozen_identity();
}

StateDict DataParallelModel::state_dict() const {
  reducer_->finish_pending();
  return state_->save();
}

void DataParallelModel::load_state_dict(const StateDict& state) {
  reducer_->finish_pending();  // else pending buffers would overwrite the loaded ones
  state_->load(state);
}

}  // namespace ddp
