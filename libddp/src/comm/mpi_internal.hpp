// SPDX-License-Identifier: Apache-2.0
// What the MPI runtime and the MPI communicator share. Includes mpi.h: for .cpp files of this
// folder.
#pragma once

#include <mpi.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_reduce_ops.hpp"
#include "comm/mpi_runtime.hpp"
#include "comm/progress_engine.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Throws PeerLostError (MismatchError where the ranks' sizes differ) with MPI's own text.
void check_mpi(int code, const char* call);

/// Something for the MPI thread to do: `launch` makes the calls and leaves the requests to be
/// waited for, `finish` runs when all of them ended. Closures hold the tensors.
struct MpiOperation {
  std::function<std::string()> describe;  ///< "all_reduce #7 (…)", for messages
  std::chrono::milliseconds limit{0};     ///< 0: none
  std::function<void(std::vector<MPI_Request>&)> launch;
  std::function<bool()> may_finish;  ///< asked when the requests ended; empty: yes
  std::function<void()> finish;
  std::function<void(const std::string&, const std::exception_ptr&)> on_failure;
  std::vector<MPI_Request> requests;
  std::string trace_name;  ///< empty: not traced
  int64_t begin_ns = 0;

  void start();
  bool poll();
  std::chrono::milliseconds timeout() const { return limit; }
  std::exception_ptr timed_out() const;
  void failed(const std::exception_ptr& error);
};

/// MPI is initialised once in a process, and never again after MPI_Finalize: what all runtimes
/// share. One thread makes every MPI call. Ends with the process, or with the last runtime where
/// that ends later.
class MpiProcess {
 public:
  using Engine = ProgressEngine<MpiOperation>;

  static std::shared_ptr<MpiProcess> instance();
  MpiProcess();
  /// Waits for all ranks in MPI_Finalize, unless somebody else initialised MPI or abandon() was
  /// called.
  ~MpiProcess();

  Engine& engine() { return *engine_; }
  void abandon() { abandoned_ = true; }
  void add_runtime() { ++num_runtimes_; }
  void remove_runtime() { --num_runtimes_; }
  int num_runtimes() const { return num_runtimes_; }  ///< that have not ended
  /// Valid after initialize() has run.
  bool initialized_here() const { return initialized_here_; }

  /// Keeps `control_plane` open until finalize() or close_control_plane().
  void watch_end(std::shared_ptr<ControlPlane> control_plane);
  /// Collective; does nothing where none is kept. Throws PeerLostError naming a rank that is lost.
  void close_control_plane();
  /// False where `ticket` is not finished within `limit`. Throws PeerLostError naming the rank as
  /// soon as the control plane that is kept knows of a lost one.
  bool wait_watched(Engine::Ticket& ticket, std::chrono::milliseconds limit);

  /// On the MPI thread. Throws SettingsError where MPI cannot be used.
  void initialize();
  std::shared_ptr<const MpiReduceOps> reduce_ops() const { return reduce_ops_; }

 private:
  void finalize();
  std::shared_ptr<ControlPlane> control_plane();

  const int pid_;
  std::atomic<bool> abandoned_{false};
  std::atomic<int> num_runtimes_{0};
  std::mutex mutex_;
  std::shared_ptr<ControlPlane> control_plane_;     // of the last context, where it was closed
  bool initialized_here_ = false;                   // of the MPI thread, as is
  std::shared_ptr<const MpiReduceOps> reduce_ops_;  // which is null before initialize()
  std::unique_ptr<Engine> engine_;
};

/// What the MPI thread knows of one runtime. Shared with what runs there, which may outlive the
/// MpiThread where a call never returns.
struct MpiState {
  int rank = 0;
  int world_size = 1;
  MPI_Comm world = MPI_COMM_NULL;  ///< our duplicate: the user's messages never meet ours
  std::shared_ptr<const MpiReduceOps> reduce_ops;

  void initialize(MpiProcess& process);
};

class MpiThread final : public MpiRuntime {
 public:
  using Engine = MpiProcess::Engine;

  MpiThread();
  ~MpiThread() override;
  void initialize(std::chrono::milliseconds timeout);

  int rank() const override { return state_->rank; }
  int world_size() const override { return state_->world_size; }
  std::string broadcast(const std::string& value, int root,
                        std::chrono::milliseconds timeout) override;
  void finalize() override;
  bool ends_mpi() const override;
  void watch_end(std::shared_ptr<ControlPlane> control_plane) override;
  void abandon(const std::string& reason) override;

  Engine& engine() { return process_->engine(); }
  const std::shared_ptr<MpiState>& state() const { return state_; }
  /// Of a communicator: ends with this runtime.
  Engine::LanePtr make_lane();

 private:
  Engine::TicketPtr submit(const std::string& what, std::function<void()> action);
  /// True for the first who ends the runtime.
  bool begin_end();
  void abort_lanes(const std::string& reason);
  /// Waits until the MPI thread is done with what it was doing. False where that takes longer.
  bool go_around(std::chrono::milliseconds limit);

  const std::shared_ptr<MpiProcess> process_ = MpiProcess::instance();
  const std::shared_ptr<MpiState> state_ = std::make_shared<MpiState>();
  std::mutex mutex_;
  bool ended_ = false;
  std::vector<std::weak_ptr<Engine::Lane>> lanes_;
  Engine::LanePtr lane_;
};

}  // namespace ddp::detail
