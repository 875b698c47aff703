// SPDX-License-Identifier: Apache-2.0
// Ownership of a folder. The owner keeps a record FOLDER/.owner: its host, job and process, and a
// counter that it advances every two seconds. Other processes detect a live owner by the counter,
// never by clocks or file times, which differ between hosts. Torch-free.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "core/files/file_ops.hpp"
#include "train/background_task.hpp"

namespace ddp::detail {

inline constexpr const char* kOwnerName = ".owner";

struct OwnerRecord {
  std::string host = "";
  std::string job = "";      ///< the scheduler's id; empty without a scheduler
  int64_t process = 0;       ///< process id on that host
  std::string machine = "";  ///< the boot and the namespace of `process`
  std::string start = "";    ///< random: distinguishes two owners; empty: the record cannot be read
  bool ending = false;       ///< it was asked to stop
  int64_t beats = 0;

  std::string to_text() const;
  /// Accepts any bytes: missing fields stay empty.
  static OwnerRecord parse(const std::string& text);
  /// `host "node1", job "123", process 4711`.
  std::string to_words() const;
};

/// Another process owns the folder: a retry does not help.
struct FolderTakenError : Error {
  using Error::Error;
};

struct OwnerTimes {
  std::chrono::milliseconds beat{2'000};
  std::chrono::milliseconds watch{10'000};  ///< a counter still for this long: the owner is dead
  std::chrono::milliseconds wait{120'000};  ///< longest wait for an owner that is ending
};

class FolderOwner {
 public:
  struct Folder {
    std::string path;
    std::string words;  ///< for messages: "checkpoint.dir=runs/a"
    std::string fix;    ///< "name another checkpoint.dir"
    std::string job = "";
  };

  /// Takes an existing folder. Owners of one folder within a process share one object. Without a
  /// record, takes it at once.
  /// - The record of a process that has ended on this host is replaced at once, any other one after
  ///   its counter stood still for `watch`.
  /// - Waits for an owner that was asked to stop, or is of the same job (a requeued job's
  ///   predecessor).
  /// - Throws FolderTakenError (64) naming another live owner, FileError if nothing can be written.
  ///   A stop request ends every wait with FolderTakenError (75).
  static std::shared_ptr<FolderOwner> take(FileOps& ops, const Folder& folder,
                                           const OwnerTimes& times = {});
  /// Removes the record.
  ~FolderOwner();
  FolderOwner(const FolderOwner&) = delete;
  FolderOwner& operator=(const FolderOwner&) = delete;

  /// Whether another process had taken the folder at the last beat. Any thread.
  bool lost() const { return lost_; }
  /// The process that took the folder while this process was suspended, or nothing. Reads the
  /// record.
  std::optional<OwnerRecord> successor() const;
  /// Throws FolderTakenError (73) if there is a successor.
  void require_own() const;

 private:
  FolderOwner(FileOps& ops, const Folder& folder, const OwnerTimes& times);
  void claim();
  void require_no_stop(const OwnerRecord& other) const;
  bool create();
  bool replace(const std::string& seen);
  void beat();

  FileOps& ops_;
  const Folder folder_;
  const std::string path_;  ///< of the record
  const OwnerTimes times_;
  OwnerRecord own_;
  std::atomic<bool> lost_ = false;
  std::optional<PeriodicTask> beats_;  // last: ends before the members that it uses
};

}  // namespace ddp::detail
