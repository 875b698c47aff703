// SPDX-License-Identifier: Apache-2.0
// What the MPI runtime and the MPI communicator share. Includes mpi.h: for .cpp files of this
// folder.
#pragma once

#include <mpi.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_reduce_ops.hpp"
#include "comm/mpi_runtime.hpp"
#include "comm/progress_engine.hpp"

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

/// What the MPI thread knows. Shared with what runs there, which may outlive the MpiThread where a
/// call never returns.
struct MpiState {
  int rank = 0;
  int world_size = 1;
  bool initialized_here = false;
  bool finalized = false;          ///< MPI must not be called any more
  MPI_Comm world = MPI_COMM_NULL;  ///< our duplicate: the user's messages never meet ours
  std::unique_ptr<MpiReduceOps> reduce_ops;

  void initialize();
  void finalize();
};

class MpiThread final : public MpiRuntime {
 public:
  using Engine = ProgressEngine<MpiOperation>;

  MpiThread();
  ~MpiThread() override;
  void initialize(std::chrono::milliseconds timeout);

  int rank() const override { return state_->rank; }
  int world_size() const override { return state_->world_size; }
  std::string broadcast(const std::string& value, int root,
                        std::chrono::milliseconds timeout) override;
  void finalize() override;
  void abandon(const std::string& reason) override;

  Engine& engine() { return engine_; }
  const std::shared_ptr<MpiState>& state() const { return state_; }

  /// Runs `action` on the MPI thread and waits for it; for calls that block. Throws PeerLostError
  /// where it does not end within `limit`.
  void call(const Engine::LanePtr& lane, const std::string& what, std::function<void()> action,
            std::optional<std::chrono::seconds> limit = std::nullopt);

 private:
  Engine::TicketPtr submit(const Engine::LanePtr& lane, const std::string& what,
                           std::function<void()> action);
  /// True for the first who ends the runtime.
  bool begin_end();

  const std::shared_ptr<MpiState> state_ = std::make_shared<MpiState>();
  std::mutex mutex_;
  bool ended_ = false;
  Engine engine_;
  Engine::LanePtr lane_;
};

}  // namespace ddp::detail
