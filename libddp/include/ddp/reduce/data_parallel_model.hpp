// SPDX-License-Identifier: Apache-2.0
// The part of DistributedDataParallel that does not depend on the module's type.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/detail/no_sync.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/logging_data.hpp"
#include "ddp/reduce/model_tensors.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp {

class DataParallelModel;
class JoinScope;
class Reducer;
namespace detail {
class Listeners;
const ModelTensors& all_tensors(const DataParallelModel& model);
Listeners& exact_sync_listeners(const DataParallelModel& model);
/// Called at the start of join(model, loop): an optimizer whose step is collective throws.
Listeners& join_listeners(const DataParallelModel& model);
}  // namespace detail

/// Keeps the replicas on a communicator's ranks equal. You can also construct it from a list
/// (`ModelTensors{.parameters = …}`). Then call prepare_for_backward() after each forward.
class DataParallelModel : public Stateful {
 public:
  /// Collective. All ranks throw MismatchError with the first difference in names, order, shapes,
  /// strides, dtypes, requires_grad and settings. Then (init_sync) sends rank 0's parameters and
  /// buffers, and (seed_ranks) seeds the default generators of all ranks but rank 0 differently.
  /// Throws SettingsError if nothing requires a gradient.
  DataParallelModel(ModelTensors tensors, CommunicatorPtr communicator,
                    const DdpOptions& options = {});
  /// Move it only before a Checkpointer, GraphedStep, join, Metrics or NoSync uses it. Optimizers
  /// stay valid.
  DataParallelModel(DataParallelModel&&) noexcept;
  ~DataParallelModel() override;

  std::vector<at::Tensor> parameters() const;       ///< of the module, also frozen and ignored ones
  const NamedParameters& named_parameters() const;  ///< the same, with names
  /// Parameters that required a gradient at construction, in registration order. They may be frozen
  /// between steps (docs/semantics.md, "Frozen parameters").
  const NamedParameters& trained_parameters() const;
  NamedParameters named_buffers() const;        ///< of the module, without ignored ones
  const CommunicatorPtr& communicator() const;  ///< as given to the constructor
  const DdpOptions& options() const;            ///< as given to the constructor
  bool is_training() const;                     ///< the module's mode
  bool require_backward_grad_sync() const;      ///< false inside no_sync()
  bool is_joining() const;                      ///< true inside join()
  Reducer& reducer() const;                     ///< internal

  /// Makes the .grad of each of parameters() undefined; writes no memory.
  void zero_grad();
  /// While the returned object lives, backward accumulates local gradients and sends nothing.
  /// Forward and backward must both run inside. The next backward averages the whole sum. Nests.
  NoSync no_sync() { return NoSync(*this); }

  /// `loss_sum` is this rank's sum over its `count` items; `count` may be 0. A synchronised
  /// backward makes .grad the gradient of (sum over ranks) / (sum of counts), the exact global
  /// mean. Under no_sync() counts add up. If float16 gradients of the sum overflow, multiply
  /// `loss_sum` and `count` by one constant, equal on all ranks and about 1 / (typical count).
  /// Throws SettingsError if all parameters are frozen, if `loss_sum` requires no gradient, if
  /// gradients of a backward() under no_sync() are pending, or for a `count` that is negative,
  /// infinite or NaN.
  void weighted_backward(const at::Tensor& loss_sum, double count);
  /// `count` is a one-element tensor on the model's device. The call reads its value, so the tensor
  /// may be refilled afterwards. Each replay of a CUDA graph reads its current value. Counts are
  /// added in float32, exact below 2^24, or in float64 for a model with float64 gradients. If the
  /// counts of all ranks are 0, all gradients are 0. A count of NaN makes all gradients NaN.
  /// Negative counts are not detected.
  void weighted_backward(const at::Tensor& loss_sum, const at::Tensor& count);

  /// Replaces the all-reduce of buckets. Call it once, before the first forward, on every rank,
  /// with hooks of equal names (else MismatchError in the first synchronised forward).
  void register_comm_hook(std::shared_ptr<CommHook> hook);

  /// Call this after a forward that did not go through the wrapper and before its backward. Pass
  /// the forward's outputs; find_unused_parameters requires them.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs = {});

  void sync_buffers(int root = 0);  ///< sends rank `root`'s buffers now; collective
  /// Sends rank `root`'s parameters and buffers. Collective. Optimizers made from this model reset
  /// their float32 masters to the parameters at once. With exactly=false, a master that rounds to
  /// its parameter is kept; masters may then differ between ranks. With optimizer.zero1 such a
  /// master is always kept, because it is on one rank only.
  void sync_module_states(int root = 0, bool exactly = true);

  /// Milliseconds that the compute stream (CPU: the thread) waited for reductions in the last
  /// backward. The host waits until the device has finished that backward.
  double exposed_communication_ms();
  DdpLoggingData logging_data();  ///< the host may wait for the last measured backward

  /// After this call state_dict() holds a hash of the parameters frozen at construction instead of
  /// their values. Do not change these parameters. load_state_dict() throws MismatchError if the
  /// hash differs.
  void leave_frozen_out_of_state();
  std::string compute_frozen_fingerprint() const;  ///< hashes the frozen parameters now
  const std::string& frozen_fingerprint() const;   ///< the first result, cached

  std::string state_name() const override { return options().name; }
  /// Throws MismatchError after a backward that left parameters without a gradient, and for a
  /// parameter that was registered after wrapping.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 protected:
  void before_forward();  ///< for wrappers: sends buffers that are due
  /// For wrappers: prepares the backward. `output_type` is for messages.
  void after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known,
                     const char* output_type);

 private:
  friend class NoSync;
  friend const ModelTensors& detail::all_tensors(const DataParallelModel& model);
  friend detail::Listeners& detail::exact_sync_listeners(const DataParallelModel& model);
  friend detail::Listeners& detail::join_listeners(const DataParallelModel& model);
  friend class JoinScope;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace ddp
