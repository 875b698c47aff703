// SPDX-License-Identifier: Apache-2.0
// Collectives over the ranks of a group.
//
// Semantics of all backends:
// - Every rank of the group calls the same operations in the same order with tensors of equal shape
//   and dtype, except where sizes are given. Tensors are non-overlapping and dense; elements are
//   sent in memory order.
// - A call returns at once. CUDA calls run on the communicator's own stream, which first waits for
//   the caller's stream. A progress thread executes CPU calls. Use results only after Work::wait().
// - Sizes count rows of dimension 0, by rank, as PyTorch's split sizes. Such tensors are
//   contiguous, and rows of all ranks have equal shapes. A rank may have 0 rows.
// - The calls of a communicator run one after the other. Work::wait() waits for its call and for
//   earlier ones, never for a later one. On CUDA each call has an event of its own for that, except
//   that the calls of a GroupScope have one together.
// - Dtypes: float32/64, float16, bfloat16, int8..int64, uint8 and bool. Avg takes floating types
//   only. It divides float16 before it adds, so a finite mean never overflows;
//   docs/semantics_collectives.md has the other types. For bool, Sum and Max are "or", Product and
//   Min are "and".
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "ddp/core/membership.hpp"
#include "ddp/detail/group_parts.hpp"

namespace ddp {
namespace detail {
struct Exchange;
}

/// A collective that has been started. It holds its tensors until wait() returns, or until it is
/// destroyed after its end.
class Work {
 public:
  virtual ~Work() = default;
  /// The caller's current *stream* waits (CPU: the host). Rethrows the collective's error.
  virtual void wait() = 0;
  /// The *host* waits for the result. Throws PeerLostError after `timeout`.
  virtual void wait_host(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;
  virtual bool is_completed() = 0;  ///< never blocks
};

using WorkPtr = std::shared_ptr<Work>;  ///< shared by the caller and the backend

enum class ReduceOp { Sum, Avg, Min, Max, Product };  ///< Avg: the sum / world_size
const char* to_string(ReduceOp op);                   ///< for messages: "sum", "avg", …

class Communicator : public detail::GroupParts {
 public:
  virtual ~Communicator() = default;

  virtual const char* backend() const = 0;                      ///< "nccl", "mpi" or "single"
  virtual at::Device device() const = 0;                        ///< where its tensors live
  const Membership& membership() const { return membership_; }  ///< of this group
  int rank() const { return membership_.rank; }                 ///< within this group
  int world_size() const { return membership_.world_size; }     ///< of this group

  virtual WorkPtr all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::Sum) = 0;  ///< in place
  virtual WorkPtr broadcast(at::Tensor tensor, int root = 0) = 0;  ///< root's elements, in place
  /// `input` has world_size times the elements of `output`. Rank r receives the reduced r-th part.
  /// `output` may be that part of `input`.
  virtual WorkPtr reduce_scatter(at::Tensor output, at::Tensor input,
                                 ReduceOp op = ReduceOp::Sum) = 0;
  /// `output` has world_size times the elements of `input`, in rank order. `input` may be this
  /// rank's part of `output`.
  virtual WorkPtr all_gather(at::Tensor output, at::Tensor input) = 0;
  /// Reduces into root's tensor. The other ranks keep theirs.
  virtual WorkPtr reduce(at::Tensor tensor, int root = 0, ReduceOp op = ReduceOp::Sum) = 0;

  // These send one message to each rank that receives something.
  /// Rank r has `sizes[r]` rows, and `output` has the rows of all ranks. `sizes` is equal on all
  /// ranks. `input` may be this rank's part of `output`.
  WorkPtr all_gather(at::Tensor output, at::Tensor input, at::IntArrayRef sizes);
  /// Sends part r of `input` to rank r. Part r of `output` comes from rank r. The parts are equal,
  /// or have these numbers of rows (PyTorch's output_split_sizes and input_split_sizes).
  WorkPtr all_to_all(at::Tensor output, at::Tensor input, at::IntArrayRef output_sizes = {},
                     at::IntArrayRef input_sizes = {});
  /// Like all_gather() on `root`. Other ranks may give an undefined `output`.
  WorkPtr gather(at::Tensor output, at::Tensor input, int root = 0);
  /// Rank r receives part r of root's `input`, of which `output` may be its own part. Other ranks
  /// may give an undefined `input`.
  WorkPtr scatter(at::Tensor output, at::Tensor input, int root = 0);
  virtual WorkPtr send(at::Tensor tensor, int destination) = 0;  ///< to that rank's recv()
  virtual WorkPtr recv(at::Tensor tensor, int source) = 0;       ///< in place, as sent
  virtual void barrier() = 0;  ///< the host waits until every rank of the group has called

  /// NCCL launches the operations between the two calls together. Use GroupScope.
  virtual void group_start() {}
  virtual void group_end() {}  ///< launches the group

  /// Collective. Ranks with equal `color` form a group, ordered by (`key`, rank). A negative color
  /// gives nullptr.
  virtual std::shared_ptr<Communicator> split(int color, int key) = 0;

  /// Ends all pending operations on this rank with an error. Later calls throw PeerLostError with
  /// `reason`. Any thread, idempotent.
  virtual void abort(const std::string& reason) = 0;
  /// Sets the step shown in failure messages. `first_step_timeout` applies until step 1; without
  /// this call until a wrapped model runs forward after its first reduced backward. Cheap; any
  /// thread. Also applies to groups made by split().
  virtual void set_step(int64_t /*step*/) {}

 protected:
  virtual WorkPtr exchange(const detail::Exchange& exchange) = 0;  ///< of checked arguments

  /// A group made by split() names its `parent`.
  explicit Communicator(Membership membership, const Communicator* parent = nullptr);

 private:
  const Membership membership_;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;  ///< shared by all objects that communicate

/// Launches the operations called in its lifetime together. Wait for their works after it ends.
/// Scopes of one communicator nest. Calling another one in this thread throws SettingsError.
class GroupScope {
 public:
  explicit GroupScope(Communicator& communicator);  ///< calls group_start()
  ~GroupScope();
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

 private:
  Communicator& communicator_;
};

/// Auto: Single for one rank, else Nccl on GPUs and Mpi on CPUs.
enum class CommBackend { Auto, Nccl, Mpi, Single };

struct CommunicatorOptions {
  CommBackend backend = CommBackend::Auto;
  /// Time limit of a collective, from its call. With NCCL an expired limit is noticed only after
  /// the Work was waited for, queried or destroyed, or after a later collective was launched.
  std::chrono::milliseconds timeout{600'000};
  std::chrono::milliseconds first_step_timeout{1'800'000};  ///< until the first step has ended
  int64_t nccl_min_ctas = 0;                                ///< 0: NCCL chooses
  int64_t nccl_max_ctas = 0;
  /// Debugging: before each collective the host waits for the slowest rank and compares the ranks'
  /// calls. Does not check send() and recv(). A GraphedStep captures nothing meanwhile.
  bool check_collectives = false;
};

/// Makes a group of one rank. Reductions change nothing; all_gather and reduce_scatter copy.
CommunicatorPtr make_single_communicator(at::Device device, Membership membership = {});

}  // namespace ddp
