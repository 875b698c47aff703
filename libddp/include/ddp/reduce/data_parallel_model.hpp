// SPDX-License-Identifier: Apache-2.0
// The part of DistributedDataParallel that does not depend on the module's type.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/ddp_options.hpp"
#include "ddp/reduce/logging_data.hpp"
#include "ddp/reduce/named_parameter.hpp"

namespace ddp {

class JoinScope;
class NoSync;
class Reducer;

/// What a model gives to be made data-parallel.
struct ModelTensors {
  NamedParameters parameters = {};  ///< in registration order, frozen ones too
  NamedParameters buffers = {};
  /// Reads the buffers anew (a module may replace them); empty: `buffers` stay the same tensors.
  std::function<NamedParameters()> read_buffers = {};
  std::function<bool()> is_training{};  ///< empty: always in training mode
  /// One number for the modes of all submodules: equal where each is in the same mode. Cheap.
  std::function<uint64_t()> training_modes{};
  bool has_collective_forward = false;  ///< it holds a SyncBatchNorm
};

/// Keeps replicas on the ranks of a communicator in step. Also usable by itself over a bare list of
/// parameters: call prepare_for_backward() after each forward.
class DataParallelModel : public Stateful {
 public:
  /// Collective. Compares names, order, shapes, strides, dtypes, requires_grad and the settings
  /// over all ranks and throws MismatchError on all of them with the first difference; then
  /// (init_sync) sends rank 0's parameters and buffers. Throws SettingsError where nothing requires
  /// a gradient.
  DataParallelModel(ModelTensors tensors, CommunicatorPtr communicator,
                    const DdpOptions& options = {});
  ~DataParallelModel() override;
  DataParallelModel(const DataParallelModel&) = delete;
  DataParallelModel& operator=(const DataParallelModel&) = delete;

  /// The parameters that are trained here, in registration order.
  const NamedParameters& named_parameters() const;
  /// Those that are frozen or ignored too.
  const NamedParameters& all_parameters() const { return all_tensors_.parameters; }
  NamedParameters named_buffers() const;
  const CommunicatorPtr& communicator() const { return communicator_; }
  const DdpOptions& options() const { return options_; }
  /// libddp's own parts use it.
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  bool has_collective_forward() const { return tensors_.has_collective_forward; }
  bool is_training() const { return !tensors_.is_training || tensors_.is_training(); }
  /// Which submodules are in training mode, as one number.
  uint64_t training_modes() const {
    return tensors_.training_modes ? tensors_.training_modes() : (is_training() ? 1 : 0);
  }
  /// False inside no_sync().
  bool require_backward_grad_sync() const { return sync_; }
  /// Inside join().
  bool is_joining() const { return join_ != nullptr; }

  /// Leaves every .grad undefined: no memory is written.
  void zero_grad();

  /// While it lives, backward adds up local gradients and sends nothing; forward and backward must
  /// both run inside. The first backward after it averages the whole sum over the ranks.
  [[nodiscard]] NoSync no_sync();

  /// `loss_sum` is this rank's sum over its `count` items: after a synchronised backward .grad is
  /// the gradient of sum over ranks / sum of counts, exactly the global mean also for ragged
  /// batches. Under no_sync() counts add up. `count` may be 0. Gradients of a sum travel the wire:
  /// with float16 there (fp16_compress, a GradScaler) give w * loss_sum and w * count with the same
  /// w on every rank, near 1 / count, or they overflow; w cancels.
  void weighted_backward(const at::Tensor& loss_sum, double count);
  /// `count` has one element, on the model's device, and is 0 or more, which nobody checks: where
  /// the sum over the ranks is not above 0 (negative, NaN) all gradients are 0. It is added up in
  /// float32, exact below 2^24, with counts that the host gave. The host does not wait, so that a
  /// captured step counts anew in each replay.
  void weighted_backward(const at::Tensor& loss_sum, const at::Tensor& count);

  /// Replaces the all-reduce of buckets; once, before the first forward, on every rank: the first
  /// synchronised forward compares the hooks' names and throws MismatchError where they differ.
  void register_comm_hook(std::shared_ptr<CommHook> hook);

  /// For forwards that do not go through the wrapper: announces a synchronised backward. With
  /// `outputs` two forwards before two backwards, and forwards without a backward, are told apart;
  /// find_unused_parameters needs them (throws SettingsError).
  void prepare_for_backward(const std::vector<at::Tensor>& outputs = {});

  /// Sends rank 0's buffers now. Collective.
  void sync_buffers();

  /// Rank `root`'s parameters and buffers on all ranks; optimizers' float32 masters of half
  /// parameters become what these are. Collective.
  void sync_module_states(int root = 0);

  /// Time in which the compute stream (CPU: the thread) waited for reductions in the last finished
  /// backward, in milliseconds. CUDA: the host waits for that backward's end. Near 0 at world size 1.
  double exposed_communication_ms();
  DdpLoggingData logging_data();

  /// From here on state_dict() holds, of the parameters that are not trained, only their
  /// fingerprint: a checkpoint of adapters leaves out the base under them, and load_state_dict()
  /// throws MismatchError where the base here is another. They must not be changed afterwards.
  void leave_frozen_out_of_state() { frozen_in_state_ = false; }

  /// 16 hexadecimal digits over names, dtypes, shapes and every bit of the parameters that are not
  /// trained: equal texts mean an equal base. Reads them anew each time; the host waits.
  std::string frozen_fingerprint() const;
  /// The fingerprint when it was first asked for, by a caller, a save or a load: they share one
  /// reading of the base.
  const std::string& frozen_identity() const;

  std::string state_name() const override { return "model"; }
  /// All parameters and buffers; see leave_frozen_out_of_state().
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 protected:
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known,
                     const char* output_type);
  bool needs_outputs() const;

 private:
  friend class NoSync;
  friend class JoinScope;

  void require_weighted_join() const;
  void send_module_states(int root, bool exactly);
  void broadcast_buffers_now(int root);
  bool sends_buffers_in_training() const;
  NamedParameters state_tensors() const;
  bool is_ignored(const std::string& name) const;
  void require_same_frozen(const StateDict& state) const;

  ModelTensors all_tensors_;
  ModelTensors tensors_;  // without ddp.parameters_to_ignore
  CommunicatorPtr communicator_;
  DdpOptions options_;
  std::unique_ptr<Reducer> reducer_;
  bool frozen_in_state_ = true;
  mutable std::string frozen_identity_;  // of frozen_fingerprint(), read once; empty: not yet
  bool sync_ = true;                     // false inside no_sync
  bool require_buffer_sync_ = true;      // the last training forward was a synchronised one
  JoinScope* join_ = nullptr;
};

/// Restores the previous state at its end, also when an exception passes; nests.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(DataParallelModel& model) : model_(model), previous_(model.sync_) {
    model_.sync_ = false;
  }
  ~NoSync() { model_.sync_ = previous_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  DataParallelModel& model_;
  bool previous_;
};

inline NoSync DataParallelModel::no_sync() {
  return NoSync(*this);
}

}  // namespace ddp
