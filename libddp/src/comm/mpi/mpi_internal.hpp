// SPDX-License-Identifier: Apache-2.0
// Shared by the MPI runtime and the MPI communicator. Includes mpi.h: only for .cpp files of this
// folder.
#pragma once

#include <c10/core/ScalarType.h>
#include <mpi.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi/mpi_runtime.hpp"
#include "comm/mpi/progress_engine.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Throws PeerLostError (MismatchError if the ranks' sizes differ) with MPI's own text.
void check_mpi(int code, const char* call);

/// Reductions of LibTorch dtypes. Created and used on the MPI thread.
///
/// MPI has no float16 and bfloat16: they travel as 2-byte integers. Our own MPI_Op reduces each
/// pair in float32 and rounds once.
class MpiReduceOps {
 public:
  MpiReduceOps();
  ~MpiReduceOps() = default;  // the ops live until MPI_Finalize
  MpiReduceOps(const MpiReduceOps&) = delete;
  MpiReduceOps& operator=(const MpiReduceOps&) = delete;

  static MPI_Datatype datatype(c10::ScalarType dtype);
  /// Avg maps to Sum; divide_by() finishes it.
  MPI_Op op(c10::ScalarType dtype, ReduceOp op) const;

 private:
  MPI_Op half_[4];      // sum, min, max, product
  MPI_Op bfloat16_[4];  // the same
};

/// data[i] /= divisor, in float32 for the 2-byte types. Floating dtypes only.
void divide_by(void* data, int64_t num_elements, c10::ScalarType dtype, int divisor);

/// The requests of an operation. MPI ends a receive in silence if a shorter message arrives, so
/// receives are compared with what arrived.
class MpiRequests {
 public:
  MPI_Request& emplace_back() { return requests_.emplace_back(); }
  void receive(void* data, int count, MPI_Datatype datatype, int source, int tag, MPI_Comm comm);
  bool empty() const { return requests_.empty(); }
  /// Forgets the requests once all have ended, and returns true. `describe` names their operation.
  bool have_ended(const std::function<std::string()>& describe);

 private:
  struct Receive {
    size_t request;
    int count;
    MPI_Datatype datatype;
  };

  std::vector<MPI_Request> requests_;
  std::vector<Receive> receives_;
};

/// Work for the MPI thread. `launch` makes the calls and appends their requests; `finish` runs when
/// all requests have ended. The closures own the tensors.
struct MpiOperation {
  std::function<std::string()> describe;  ///< "all_reduce #7 (…)", for messages
  std::chrono::milliseconds limit{0};     ///< 0: none
  std::function<void(MpiRequests&)> launch;
  std::function<bool()> may_finish;  ///< called when the requests have ended; empty: true
  std::function<void()> finish;
  std::function<void(const std::string&, const std::exception_ptr&)> on_failure;
  MpiRequests requests;
  std::string trace_name;  ///< empty: not traced
  int64_t begin_ns = 0;

  void start();
  bool poll();
  std::chrono::milliseconds timeout() const { return limit; }
  std::exception_ptr timed_out() const;
  void failed(const std::exception_ptr& error);
};

/// MPI state shared by all runtimes. MPI is initialised once per process, and never again after
/// MPI_Finalize. One thread makes every MPI call.
class MpiProcess {
 public:
  using Engine = ProgressEngine<MpiOperation>;

  /// Never destroyed: communicators in static objects may outlive end().
  static MpiProcess& instance();
  MpiProcess();

  Engine& engine() { return engine_; }
  void abandon() { abandoned_ = true; }
  void add_runtime() { ++num_runtimes_; }
  void remove_runtime() { --num_runtimes_; }
  int num_runtimes() const { return num_runtimes_; }  ///< not yet ended
  bool has_ended() const { return has_ended_; }       ///< no operation can be submitted
  /// Valid after initialize() has run.
  bool initialized_here() const { return initialized_here_; }

  /// Keeps `control_plane` open until finalize() or close_control_plane().
  void keep_open_until_end(std::shared_ptr<ControlPlane> control_plane);
  /// Collective; does nothing without a kept plane. Throws PeerLostError naming a lost rank.
  void close_control_plane();
  /// Returns false if `ticket` is not finished within `limit`. Throws PeerLostError naming the rank
  /// as soon as the kept control plane knows a lost one.
  bool wait_watched(Engine::Ticket& ticket, std::chrono::milliseconds limit);

  /// Runs on the MPI thread. Throws SettingsError if MPI is not usable.
  void initialize();
  std::shared_ptr<const MpiReduceOps> reduce_ops() const { return reduce_ops_; }

 private:
  /// At process exit. Waits for all ranks in MPI_Finalize, unless other code initialised MPI or
  /// abandon() was called.
  void end();
  void finalize();
  std::shared_ptr<ControlPlane> control_plane();

  std::atomic<bool> abandoned_{false};
  std::atomic<bool> has_ended_{false};
  std::atomic<int> num_runtimes_{0};
  std::mutex mutex_;
  std::shared_ptr<ControlPlane> control_plane_;     // the last context's, if it was closed
  bool initialized_here_ = false;                   // set by the MPI thread
  std::shared_ptr<const MpiReduceOps> reduce_ops_;  // likewise; null before initialize()
  Engine engine_;
};

/// The MPI thread's data of one runtime. Shared with running operations, which outlive the
/// MpiThread if a call never returns.
struct MpiState {
  Membership membership;
  MPI_Comm world = MPI_COMM_NULL;  ///< our duplicate, so user messages and ours never mix
  std::shared_ptr<const MpiReduceOps> reduce_ops;

  void initialize(MpiProcess& process);
  /// Makes the world of some ranks of `last`.
  void initialize(MpiProcess& process, const MpiState& last, const std::vector<int>& ranks);

 private:
  void begin(MpiProcess& process);
};

/// Place and number of ranks of `comm`, without hosts.
Membership membership_of(MPI_Comm comm, int64_t generation);

class MpiThread final : public MpiRuntime {
 public:
  using Engine = MpiProcess::Engine;

  MpiThread();
  ~MpiThread() override;
  void initialize(std::chrono::milliseconds timeout);

  const Membership& membership() const override { return state_->membership; }
  std::shared_ptr<MpiRuntime> meet_again(const std::vector<int>& ranks,
                                         std::chrono::milliseconds timeout) override;
  std::string broadcast(const std::string& value, int root,
                        std::chrono::milliseconds timeout) override;
  void finalize() override;
  bool ends_mpi() const override;
  void keep_open_until_end(std::shared_ptr<ControlPlane> control_plane) override;
  void abandon(const std::string& reason) override;

  Engine& engine() { return process_.engine(); }
  const std::shared_ptr<MpiState>& state() const { return state_; }
  /// For a communicator; ends with this runtime.
  Engine::LanePtr make_lane();

 private:
  Engine::TicketPtr submit(const std::string& what, std::function<void()> action);
  /// Runs the first action of the runtime, a call that returns on no rank before all ranks made it.
  void connect(const std::string& what, std::function<void()> action,
               std::chrono::milliseconds timeout);
  /// True for the first caller that ends the runtime.
  bool mark_ended();
  void abort_lanes(const std::string& reason);
  /// Waits until the MPI thread finishes its current work. Returns false at `limit`.
  bool wait_until_idle(std::chrono::milliseconds limit);

  MpiProcess& process_ = MpiProcess::instance();
  const std::shared_ptr<MpiState> state_ = std::make_shared<MpiState>();
  std::mutex mutex_;
  bool ended_ = false;
  std::vector<std::weak_ptr<Engine::Lane>> lanes_;
  Engine::LanePtr lane_;
};

}  // namespace ddp::detail
