// SPDX-License-Identifier: Apache-2.0
// Collectives of CUDA tensors. nccl_launch.hpp shows how they are enqueued.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/argument_checks.hpp"
#include "comm/child_groups.hpp"
#include "comm/collective_check.hpp"
#include "comm/communicator_state.hpp"
#include "comm/exchange.hpp"
#include "comm/nccl/collective_counters.hpp"
#include "comm/nccl/collective_progress.hpp"
#include "comm/nccl/nccl_handle.hpp"
#include "comm/nccl/nccl_launch.hpp"
#include "comm/nccl/nccl_reductions.hpp"
#include "comm/tuning/group_choices.hpp"
#include "comm/watchdog.hpp"
#include "core/control/rank_position.hpp"
#include "core/files/plan.hpp"
#include "ddp/comm/communicator.hpp"
#include "ops/shared/multiprocessors.hpp"

namespace ddp::detail {

/// Checks and compares each call, then passes it to one of its parts: the handle (lifetime), the
/// launcher (order), the reductions (dtypes and operations) or the failure detector.
class NcclCommunicator final : public Communicator,
                               public CapturableCommunicator,
                               public BackendMeasurements,
                               public std::enable_shared_from_this<NcclCommunicator> {
 public:
  /// `check` may be null.
  NcclCommunicator(NcclCommPtr comm, Membership membership, const CommunicatorOptions& options,
                   CollectiveFailureHandler on_failure, std::shared_ptr<StepTimeouts> timeouts,
                   std::shared_ptr<CollectiveCheck> check, const Communicator* parent);
  ~NcclCommunicator() override;
  /// Starts the watchdog and reports positions. `id`: see GroupPosition.
  void start(std::string id, const AddProbe& add_probe);
  const CollectiveCounters& counters() const { return launcher_.counters(); }

  const char* backend() const override { return "nccl"; }
  at::Device device() const override { return {at::kCUDA, handle_.device()}; }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override;
  WorkPtr broadcast(at::Tensor tensor, int root) override;
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input) override;
  WorkPtr reduce(at::Tensor tensor, int root, ReduceOp op) override;
  WorkPtr send(at::Tensor tensor, int destination) override;
  WorkPtr recv(at::Tensor tensor, int source) override;
  void barrier() override;
  void group_start() override { launcher_.group_start(); }
  void group_end() override { launcher_.group_end(); }
  CommunicatorPtr split(int color, int key) override;
  void abort(const std::string& reason) override;
  void set_step(int64_t step) override { timeouts_->set_step(step); }
  CapturableCommunicator* capturable() override { return this; }
  bool compares_calls() const override { return check_ != nullptr; }
  void hold_counts() override { launcher_.counters().hold_counts(); }
  void join_counts() override { launcher_.join_counts(); }

  BackendMeasurements* measurements() override { return this; }
  Plan::Identity plan_identity() const override;
  std::vector<AllReduceRow> measure_all_reduce() override;

 private:
  WorkPtr exchange(const Exchange& exchange) override;

  /// Compares a call (name, tensor, operation, root) over the ranks if check_collectives is on,
  /// outside captures. Returns its number among the compared calls.
  template <typename... Args>
  int64_t compare(const char* name, const Args&... args) const {
    return compares_now() ? compare_text(name, describe_call(name, args...)) : 0;
  }
  bool compares_now() const {
    return check_ && launcher_.capture_status() != cudaStreamCaptureStatusActive;
  }
  int64_t compare_text(const char* name, const std::string& call,
                       const std::optional<ExchangeSizes>& sizes = std::nullopt) const {
    launcher_.check_usable(name);
    return check_->compare(
        call, timeouts_->current(), [&] { handle_.state()->check(name); }, sizes);
  }

  const CommunicatorOptions options_;
  const CollectiveFailureHandler on_failure_;
  const std::shared_ptr<CollectiveCheck> check_;  // null: calls are not compared
  const std::shared_ptr<StepTimeouts> timeouts_;
  NcclHandle handle_;
  NcclLauncher launcher_;
  NcclReductions reductions_;
  at::Tensor barrier_buffer_;                                  // guarded by the launcher's lock
  std::optional<ops::MultiprocessorReservation> reservation_;  // held until destruction
  std::string id_;                                             // used in positions
  AddProbe add_probe_;
  int64_t num_splits_ = 0;  // guarded by the launcher's lock
  ChildGroups children_;
  FailureDetector failures_;  // used by the watchdog only
  std::unique_ptr<Watchdog<std::function<bool()>>> watchdog_;
};

}  // namespace ddp::detail
