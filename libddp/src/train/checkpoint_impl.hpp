// SPDX-License-Identifier: Apache-2.0
// The implementation of Checkpointer, and who waits for whom:
//
//   training thread, all ranks        writing thread, each rank       rank 0's writing thread
//   begin: folder name (broadcast)
//          copy state to the host --> write own files, fsync
//   … steps go on …
//   exchange: all wrote? -----------------------------------------> manifest, rename, prune
//   … steps go on …
//   exchange: committed
//
// Decisions use the gathered data of an exchange, so all ranks decide alike without another
// message. An exchange is a gather to rank 0 and a broadcast of the digest.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/train/checkpoint.hpp"
#include "train/background_task.hpp"
#include "train/checkpoint_files.hpp"
#include "train/folder_owner.hpp"
#include "train/save_failure.hpp"
#include "train/snapshot.hpp"

namespace ddp::detail {

class CheckpointerImpl {
 public:
  CheckpointerImpl(ControlPlane& control_plane, at::Device device, const CheckpointOptions& options,
                   std::vector<StatefulRef> objects, FileOps& ops = system_file_ops());
  ~CheckpointerImpl();

  int64_t restore();
  void save_if_due(int64_t step);
  void save(int64_t step, std::optional<double> metric);
  void wait();

  /// Reports that the next step begins; see Checkpointer::restore.
  void announce(int64_t step) const {
    if (announce_) {
      announce_(step);
    }
  }
  void set_announce(std::function<void(int64_t step)> announce) { announce_ = std::move(announce); }
  /// Receives the failure of the last save, which the destructor cannot throw.
  void set_defer_failure(std::function<void(const FailureCause&)> call) {
    defer_failure_ = std::move(call);
  }
  /// The owner of the plan of measured choices, which is saved, and pinned by restore().
  void set_communicator(const CommunicatorPtr& communicator) { communicator_ = communicator; }
  /// The job named in the folder's owner record.
  void set_launch(const LaunchEnvironment& launch) { launch_ = launch; }
  bool is_read_only() const { return options_.read_only; }
  int64_t last_saved_step() const { return last_saved_step_; }
  std::map<std::string, std::string>& texts() { return texts_; }
  void set_stop_check(std::function<bool()> check) { stop_check_ = std::move(check); }
  void set_before_save(std::function<std::string()> call) { before_save_ = std::move(call); }
  void set_before_stop(std::function<void(int64_t)> call) { before_stop_ = std::move(call); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { Writing, Committing };
  struct Pending {
    int64_t step;
    std::string folder;            ///< within dir
    bool has_metric = false;       ///< on every rank
    std::optional<double> metric;  ///< on rank 0
    std::string not_finite = "";   ///< why it counts as not finite; set once all ranks have written
    Phase phase = Phase::Writing;
    Clock::time_point started = Clock::now();
  };
  struct Status;  ///< what a rank tells in an exchange
  struct Digest;  ///< of all ranks' statuses

  bool is_main() const { return rank_ == 0; }
  bool enabled() const { return !options_.dir.empty(); }
  std::string path_of(const CheckpointFolder& folder) const {
    return options_.dir + "/" + folder.name;
  }

  // restore
  std::vector<CheckpointFolder> agree_on_candidates();
  std::vector<CheckpointFolder> find_candidates();
  void own_folder();
  void require_writable();
  void tell_start_anew() const;
  std::optional<Manifest> check_everywhere(const CheckpointFolder& folder);
  std::optional<std::pair<CheckpointFolder, Manifest>> newest_whole(
      const std::vector<CheckpointFolder>& candidates);
  void tell_changed_settings(const std::string& checkpoint, const std::string& saved,
                             const std::string& now) const;
  void load(const CheckpointFolder& folder, const Manifest& manifest);
  bool reads_file(const std::string& name) const;

  // save
  bool adds_nothing(int64_t saved_step, bool saved_has_metric, int64_t done, bool has_metric) const;
  void begin(int64_t done, std::optional<double> metric);
  std::string agree_on_folder(int64_t done);
  void write_files();
  void start_commit(const std::vector<Status>& statuses);
  void note_saved();
  void note_failure(int64_t done, int rank, const std::string& reason);
  void throw_if_unsaved();
  void defer_failure(const SaveFailure& failure) const;
  void note_call(int64_t step);

  // exchange
  std::vector<Status> exchange();
  Status own_status();
  void advance(const std::vector<Status>& statuses);
  void finish_pending();
  int64_t steps_until_exchange(const std::vector<Status>& statuses) const;
  void stop(int64_t step, const std::vector<Status>& statuses);
  void tell_stop(int64_t done);

  ControlPlane& control_plane_;
  const int rank_;
  const at::Device device_;
  const CheckpointOptions options_;
  const std::vector<StatefulRef> objects_;
  FileOps& ops_;
  LaunchEnvironment launch_;
  std::shared_ptr<FolderOwner> owner_;  ///< on rank 0, from the first call that writes
  std::function<bool()> stop_check_;
  std::function<std::string()> before_save_;
  std::function<void(int64_t)> before_stop_;
  std::function<void(int64_t)> announce_;
  std::function<void(const FailureCause&)> defer_failure_;
  std::weak_ptr<Communicator> communicator_;
  std::map<std::string, std::string> texts_;

  std::optional<Pending> pending_;
  HostBuffers buffers_;
  Snapshot snapshot_;                ///< of the pending save; the writing thread reads it
  std::vector<FileRecord> records_;  ///< written by the writing thread, read when it is idle
  std::string not_finite_;  ///< why this rank's part is not finite; synchronized as records_
  std::string committed_;   ///< folder name of the last commit; rank 0
  int64_t last_saved_step_ = -1;
  bool last_saved_has_metric_ = false;
  int64_t failures_in_a_row_ = 0;
  std::optional<SaveFailure> unsaved_;  ///< the newest save failed; not thrown yet
  bool tell_going_on_ = false;          ///< a failure was logged; whether a step follows is open
  int64_t last_call_ = -1;              ///< step of the newest call
  std::set<std::string> damaged_;       ///< checkpoints that restore() skipped
  Clock::time_point last_save_time_ = Clock::now();

  int64_t next_exchange_ = 0;  ///< number of steps done at the next exchange
  int64_t exchange_step_ = 0;  ///< number of steps done at the last exchange
  Clock::time_point exchange_time_ = Clock::now();
  double step_seconds_ = 0;  ///< measured since the last exchange
  ExchangePace pace_;
  const int exceptions_;

  BackgroundTask writer_;  // last: ends before the members that it uses
};

}  // namespace ddp::detail
