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
// Decisions use the gathered data of an exchange, so all ranks take the same decision without
// another message. An exchange is a gather to rank 0 and a broadcast of the digest.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/job/context_handle.hpp"
#include "ddp/train/checkpoint.hpp"
#include "train/checkpoint/checkpoint_exchange.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "train/checkpoint/checkpoint_restorer.hpp"
#include "train/checkpoint/checkpoint_saver.hpp"
#include "train/checkpoint/checkpoint_texts.hpp"
#include "train/checkpoint/save_history.hpp"

namespace ddp::detail {

class CheckpointerImpl {
 public:
  /// A Context receives each next step, and the failure of the last save, which the destructor
  /// cannot throw. Its communicator owns the plan of measured choices.
  CheckpointerImpl(ControlPlane& control_plane, at::Device device, const CheckpointOptions& options,
                   std::vector<StatefulRef> objects, FileOps& ops = system_file_ops(),
                   const Context* context = nullptr);
  ~CheckpointerImpl();

  int64_t restore();
  void save_if_due(int64_t step);
  void save(int64_t step, std::optional<double> metric);
  [[noreturn]] void stop(int64_t step, const std::string& who);
  void wait();

  int64_t last_saved_step() const { return history_.newest().done; }
  CheckpointTexts& texts() { return texts_; }
  void set_stop_check(std::function<bool()> check) { stop_check_ = std::move(check); }
  void set_before_save(std::function<std::string()> call) { before_save_ = std::move(call); }
  void set_after_save(std::function<void(int64_t, const std::string&)> call) {
    after_save_ = std::move(call);
  }
  void set_before_stop(std::function<void(int64_t)> call) { before_stop_ = std::move(call); }

 private:
  bool enabled() const { return !options_.dir.empty(); }
  /// Throws SettingsError if the folder is only read.
  void require_saving() const;
  std::vector<RankStatus> exchange();
  void call_after_save();
  void begin_save(int64_t done, std::optional<double> metric);
  /// Does not call after_save_.
  void finish_pending();
  void save_for_stop(int64_t done);
  void call_hooks_of_stop(int64_t done);
  void call_before_stop(int64_t done);
  void defer_failure(const SaveFailure& failure) const;

  ControlPlane& control_plane_;
  const at::Device device_;
  const CheckpointOptions options_;
  const LaunchEnvironment launch_;
  const std::vector<StatefulRef> objects_;
  const std::optional<ContextHandle> context_;
  std::function<bool()> stop_check_;
  std::function<std::string()> before_save_;
  std::function<void(int64_t, const std::string&)> after_save_;
  std::function<void(int64_t)> before_stop_;
  std::string new_checkpoint_;  // on rank 0, until after_save_ is called
  const int exceptions_;

  // A member uses the ones above it.
  CheckpointDir dir_;
  CheckpointTexts texts_;
  SaveHistory history_;
  CheckpointSchedule schedule_;
  CheckpointSaver saver_;
};

}  // namespace ddp::detail
