// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/data_parallel_model.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>

#include "ddp/ops/overwritten.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/join.hpp"
#include "reduce/fingerprint.hpp"
#include "reduce/model_check.hpp"
#include "reduce/reducer.hpp"
#include "reduce/replica_sync.hpp"

namespace ddp {
namespace {

constexpr const char* kFrozenKey = "frozen_parameters";
constexpr const char* kRankLocal = "rank_local.";  // of keys that Checkpointer saves per rank

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
                          ", which is no parameter or buffer of the module");
    }
  }
}

void run_weighted_backward(Reducer& reducer, const at::Tensor& loss_sum,
                           const detail::WeightedMean::Counts& counts_before) {
  try {
    loss_sum.backward();
  } catch (...) {
    reducer.restore_counts(counts_before);  // or the next backward would divide by this count too
    throw;
  }
}

}  // namespace

DataParallelModel::DataParallelModel(ModelTensors tensors, CommunicatorPtr communicator,
                                     const DdpOptions& options)
    : all_tensors_(std::move(tensors)),
      tensors_(all_tensors_),
      communicator_(std::move(communicator)),
      options_(options) {
  options.taken.set();
  check_ignored_names(tensors_, options_);
  tensors_.parameters =
      without_ignored(std::move(tensors_.parameters), options_.parameters_to_ignore);
  tensors_.buffers = without_ignored(std::move(tensors_.buffers), options_.parameters_to_ignore);
  // Before any other collective: ranks whose models differ must not meet in a broadcast.
  detail::check_equal_across_ranks(*communicator_, tensors_, options_);
  detail::check_supported(tensors_);
  auto trained = trainable(tensors_.parameters);
  if (trained.empty()) {
    throw SettingsError(
        "DistributedDataParallel needs a parameter that requires a gradient; this module has none: "
        "call it without the wrapper");
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

void DataParallelModel::sync_module_states(int root) {
  send_module_states(root, /*exactly=*/true);
}

void DataParallelModel::send_module_states(int root, bool exactly) {
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

void DataParallelModel::broadcast_buffers_now(int root) {
  // A pending broadcast would overwrite these buffers.
  reducer_->finish_pending();
  detail::broadcast_coalesced(*communicator_, tensors_only(named_buffers()), root);
}

void DataParallelModel::sync_buffers() {
  broadcast_buffers_now(0);
}

bool DataParallelModel::needs_outputs() const {
  return at::GradMode::is_enabled() && sync_;
}

bool DataParallelModel::sends_buffers_in_training() const {
  const bool training = !tensors_.is_training || tensors_.is_training();
  return training && communicator_->world_size() > 1 &&
         options_.broadcast_buffers == BroadcastBuffers::EachForward;
}

void DataParallelModel::before_forward() {
  if (at::GradMode::is_enabled()) {
    reducer_->join_broken_backward();
  }
  // An evaluation between forward and backward reads buffers too.
  reducer_->finish_pending();
  const bool synchronised = at::GradMode::is_enabled() && sync_;
  const bool sends_buffers =
      sends_buffers_in_training() && require_buffer_sync_ && !reducer_->buffers().take_sent();
  if (join_ != nullptr) {
    join_->announce_forward(synchronised, sends_buffers);
  }
  if (synchronised) {
    reducer_->begin_forward();
    reducer_->timing().begin_forward();
  }
  if (sends_buffers) {
    broadcast_buffers_now(join_ != nullptr ? join_->buffer_root() : 0);
  }
}

void DataParallelModel::after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known,
                                      const char* output_type) {
  if (!outputs_known && options_.find_unused_parameters) {
    throw SettingsError(detail::concat(
        "ddp.find_unused_parameters=true must see the tensors in the forward's result, but does "
        "not know the type ",
        output_type, ": ", detail::kDefineForEachTensor));
  }
  const bool synchronised = at::GradMode::is_enabled() && sync_;
  // Only training forwards, which all ranks run alike, decide whether the next one sends buffers. A
  // rank that evaluates alone must still match the others.
  if (!tensors_.is_training || tensors_.is_training()) {
    require_buffer_sync_ = synchronised;
  }
  // Sends the next training forward's buffers during this one's backward. In a join, ranks without
  // inputs answer forwards: there the next forward sends the buffers.
  if (synchronised && join_ == nullptr && sends_buffers_in_training()) {
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
    throw SettingsError(
        detail::concat("weighted_backward: count=", count,
                       " must be 0 or more: it is the number of items in loss_sum"));
  }
  require_weighted_join();
  const auto counts = reducer_->mean().counts();
  reducer_->mean().add(count);
  run_weighted_backward(*reducer_, loss_sum, counts);
}

void DataParallelModel::weighted_backward(const at::Tensor& loss_sum, const at::Tensor& count) {
  const auto device = communicator_->device();
  if (!count.defined() || count.numel() != 1 || count.device() != device) {
    throw SettingsError(detail::concat(
        "weighted_backward: the count is ",
        count.defined() ? detail::concat("a ", count.scalar_type(), " tensor of shape ",
                                         count.sizes(), " on ", count.device())
                        : "an undefined tensor",
        "; give one element on ", device, ", or the number itself as a double"));
  }
  require_weighted_join();
  const auto counts = reducer_->mean().counts();
  reducer_->mean().add(count);
  run_weighted_backward(*reducer_, loss_sum, counts);
}

void DataParallelModel::require_weighted_join() const {
  if (join_ != nullptr && !join_->is_weighted()) {
    throw SettingsError(
        "weighted_backward inside a join needs JoinOptions::weighted=true: ranks that ran out must "
        "add a weight of 0");
  }
}

// Ignored tensors belong to the model too: a file without them would be of another model. Ranks may
// hold different values, so each rank saves its own in addition to rank 0's.
NamedParameters DataParallelModel::state_tensors() const {
  auto tensors = frozen_in_state_ ? all_tensors_.parameters : trainable(all_tensors_.parameters);
  const auto buffers =
      all_tensors_.read_buffers ? all_tensors_.read_buffers() : all_tensors_.buffers;
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

std::string DataParallelModel::frozen_fingerprint() const {
  auto frozen = all_tensors_.parameters;
  std::erase_if(frozen, [](const auto& entry) { return entry.tensor.requires_grad(); });
  return detail::fingerprint_of(frozen);
}

const std::string& DataParallelModel::frozen_identity() const {
  if (frozen_identity_.empty()) {
    frozen_identity_ = frozen_fingerprint();
  }
  return frozen_identity_;
}

bool DataParallelModel::is_ignored(const std::string& name) const {
  const auto& ignored = options_.parameters_to_ignore;
  return std::find(ignored.begin(), ignored.end(), name) != ignored.end();
}

StateDict DataParallelModel::state_dict() const {
  reducer_->finish_pending();
  StateDict state;
  if (!frozen_in_state_) {
    state.values[kFrozenKey] = frozen_identity();
  }
  for (const auto& [name, tensor] : state_tensors()) {
    state.tensors.emplace(name, tensor.detach());
    if (is_ignored(name) && communicator_->world_size() > 1) {
      state.tensors.emplace(std::string(kRankLocal) + name, tensor.detach());
    }
  }
  return state;
}

void DataParallelModel::require_same_frozen(const StateDict& state) const {
  const auto found = state.values.find(kFrozenKey);
  const auto* saved =
      found != state.values.end() ? std::get_if<std::string>(&found->second) : nullptr;
  if (saved == nullptr) {
    throw MismatchError("it holds the whole model, not what was trained over a frozen base");
  }
  if (*saved != frozen_identity()) {
    throw MismatchError(detail::concat("it was trained over another base: frozen parameters ",
                                       *saved, ", here ", frozen_identity()));
  }
}

void DataParallelModel::load_state_dict(const StateDict& state) {
  reducer_->finish_pending();  // or they would be written over these buffers
  if (!frozen_in_state_) {
    require_same_frozen(state);
  }
  auto targets = state_tensors();
  std::set<std::string> expected;
  for (auto& [name, tensor] : targets) {
    const auto found = state.tensors.find(name);
    if (found == state.tensors.end()) {
      throw MismatchError("the saved model has no " + name + ": it is another model");
    }
    if (found->second.sizes() != tensor.sizes()) {
      throw MismatchError(detail::concat(name, " is saved with shape ", found->second.sizes(),
                                         " but has shape ", tensor.sizes(),
                                         " here: it is another model"));
    }
    expected.insert({name, std::string(kRankLocal) + name});
  }
  for (const auto& [name, tensor] : state.tensors) {
    if (!expected.contains(name)) {
      throw MismatchError("the saved model has " + name +
                          ", which this model does not have: it is another model");
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : targets) {
    const auto own =
        is_ignored(name) ? state.tensors.find(std::string(kRankLocal) + name) : state.tensors.end();
    tensor.copy_(own != state.tensors.end() ? own->second : state.tensors.at(name));
    ops::overwritten(tensor);
  }
}

}  // namespace ddp
