// SPDX-License-Identifier: Apache-2.0
// Collectives over the ranks of a group.
//
// Semantics, once for all backends:
// - Every rank of the group calls the same operations in the same order with tensors of equal shape
//   and dtype. Tensors are contiguous in memory order (any non-overlapping dense strides).
// - A call returns at once. On CUDA it is enqueued on the communicator's own high-priority stream,
//   which first waits for the work already on the caller's current stream; on CPU a progress thread
//   carries it out. The result may be used after Work::wait().
// - On CUDA, all_reduces of less than 4 MiB in a row are waited for together: a wait for one may
//   last until the last of those called before the wait ended, 31 more at most. So a rank must not
//   hold such a call back until it hears, by other means, that a peer waited for an earlier one.
// - float32/64, float16, bfloat16, int8..int64, uint8 and bool; Avg takes floating types only, and
//   divides float16 and bfloat16 before it adds them. For bool, Sum and Max are "or", Product and
//   Min are "and".
// - While a GroupScope is open in a thread, that thread calls its communicator alone.
// - With CommunicatorOptions::check_collectives a call that differs between ranks throws
//   MismatchError, naming both sides, on all ranks of the group. Nothing is sent then, and the
//   group can be used on. send() and recv() are not compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/all_reduce_table.hpp"
#include "ddp/comm/work.hpp"
#include "ddp/core/plan.hpp"

namespace ddp {

class ControlPlane;
class LaunchSequencer;

enum class ReduceOp { Sum, Avg, Min, Max, Product };
const char* to_string(ReduceOp op);

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const char* backend() const = 0;  ///< "nccl", "mpi" or "single"
  virtual int rank() const = 0;             ///< within this group
  virtual int world_size() const = 0;       ///< of this group
  virtual at::Device device() const = 0;    ///< where its tensors live

  /// In place.
  virtual WorkPtr all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::Sum) = 0;
  /// The same result to a caller who goes on computing meanwhile: it may take a little longer and
  /// leaves more of the device to the computation.
  virtual WorkPtr all_reduce_overlapped(at::Tensor tensor, ReduceOp op = ReduceOp::Sum) {
    return all_reduce(std::move(tensor), op);
  }
  virtual WorkPtr broadcast(at::Tensor tensor, int root = 0) = 0;
  /// `input` has world_size times the elements of `output`; rank r receives the r-th part reduced.
  /// `output` may be that part of `input`.
  virtual WorkPtr reduce_scatter(at::Tensor output, at::Tensor input,
                                 ReduceOp op = ReduceOp::Sum) = 0;
  /// `output` has world_size times the elements of `input`, in rank order. `input` may be its own
  /// rank's part of `output`.
  virtual WorkPtr all_gather(at::Tensor output, at::Tensor input) = 0;
  virtual WorkPtr send(at::Tensor tensor, int destination) = 0;
  virtual WorkPtr recv(at::Tensor tensor, int source) = 0;
  /// The host waits until every rank of the group is here.
  virtual void barrier() = 0;

  /// Between the two calls operations are collected and launched together (NCCL's group calls); on
  /// other backends they start at once. Use GroupScope.
  virtual void group_start() {}
  virtual void group_end() {}

  /// Groups of equal `color`, ordered by (`key`, rank). A negative color returns nullptr.
  /// Collective.
  virtual std::shared_ptr<Communicator> split(int color, int key) = 0;

  /// Memory the backend reduces fastest, uint8 [num_bytes], 256-byte aligned, uninitialised. It
  /// outlives the communicator. Collective: the same sizes in the same order on every rank. The
  /// first one may measure the table of all_reduce_table() (see nccl_algorithm); the host waits.
  virtual at::Tensor allocate(int64_t num_bytes) = 0;

  /// Ends all pending operations with an error on this rank; any thread, idempotent. After it every
  /// call throws PeerLostError with `reason`.
  virtual void abort(const std::string& reason) = 0;

  /// Which step this rank works on, for the messages of failures. Until it is 1 the longer
  /// `first_step_timeout` holds. Cheap; any thread; groups made by split() follow.
  virtual void set_step(int64_t /*step*/) {}
  /// Operations called so far on this rank, captured ones too. 0 where a backend does not count.
  virtual int64_t num_operations() const { return 0; }

  /// What was measured on this group, and pinned from a checkpoint or a file. Equal on all ranks as
  /// long as all make the same calls; but for what Plan says of "kernels".
  Plan& plan();
  /// Takes over the choices of rank 0's `json` where they were made on the hardware and versions
  /// of every rank; else on no rank, which the log says. Collective; the host waits. Throws
  /// ReadError naming `origin`, on all ranks, and changes nothing.
  void adopt_plan(const std::string& json, const std::string& origin);
  /// Times of all_reduce by size, from the plan, or measured when first asked for. Collective; the
  /// host waits. Empty for a group of one.
  const AllReduceTable& all_reduce_table();

  /// The agreed order in which several models launch their buckets, here and on the groups made by
  /// split(): two groups that share ranks must not be launched on in different orders (see
  /// launch_sequencer.hpp).
  LaunchSequencer& launch_sequencer();

  /// The control plane of the ranks of this group, for agreements that must not depend on which
  /// collectives a rank has called. Null for groups made by split() and without a Context.
  std::shared_ptr<ControlPlane> control_plane() const { return control_plane_.lock(); }
  void set_control_plane(const std::shared_ptr<ControlPlane>& plane) { control_plane_ = plane; }

 protected:
  Communicator();
  /// For split(); before the new group is used.
  void share_launch_sequencer_of(const Communicator& parent);

  /// What measured choices depend on besides backend and world size.
  virtual Plan::Identity plan_identity() const { return {}; }
  /// This rank's times; the slowest rank's are kept.
  virtual std::vector<AllReduceRow> measure_all_reduce();
  /// What all_reduce_table() gave last, or adopt_plan() brought; empty before.
  const AllReduceTable& known_table() const { return table_; }

 private:
  std::shared_ptr<LaunchSequencer> launch_sequencer_;
  std::weak_ptr<ControlPlane> control_plane_;
  std::unique_ptr<Plan> plan_;
  AllReduceTable table_;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Collects the operations of its lifetime into one launch. Works can be waited for behind it.
/// Scopes of one communicator nest. Another communicator called in this thread meanwhile throws
/// SettingsError.
class GroupScope {
 public:
  explicit GroupScope(Communicator& communicator) : communicator_(communicator) {
    communicator_.group_start();
  }
  ~GroupScope() { communicator_.group_end(); }
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

 private:
  Communicator& communicator_;
};

struct CommunicatorOptions {
  std::string backend = "auto";  ///< auto, nccl, mpi, single
  /// Of a collective, from when it is enqueued (NCCL: and waited for, asked about or dropped; many
  /// within a millisecond share one mark behind them).
  std::chrono::milliseconds timeout{600'000};
  std::chrono::milliseconds first_step_timeout{1'800'000};  ///< until the first step ended
  int64_t nccl_min_ctas = 0;                                ///< 0 leaves NCCL's own choice
  int64_t nccl_max_ctas = 0;
  /// Of all-reduces of float sums and means in memory of allocate(), which is then registered as
  /// symmetric window: ring, symmetric, or auto: by a table that the first allocate() outside
  /// groups and captures measures (the plan keeps it). Without a table, and where windows are not
  /// available (said once), ring is used.
  std::string nccl_algorithm = "ring";
  /// Compares what the ranks of a group call before each collective, for debugging. The host waits
  /// for the slowest rank each time, and a small message goes to rank 0 and back. Calls inside a
  /// CUDA graph capture are not compared (GraphedStep does so itself), nor are replays.
  bool check_collectives = false;
};

/// The group of one: every operation is the identity and returns completed work.
CommunicatorPtr make_single_communicator(at::Device device);

}  // namespace ddp
