// SPDX-License-Identifier: Apache-2.0
// Who writes into a folder. The owner keeps a record there, FOLDER/.owner: its host, job and
// process, and a counter that it moves every two seconds. Another process tells by the counter
// whether the owner lives, never by clocks or file times, which differ between hosts. Torch-free.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "core/file_ops.hpp"
#include "train/periodic_task.hpp"

namespace ddp::detail {

inline constexpr const char* kOwnerName = ".owner";

struct OwnerRecord {
  std::string host = "";
  std::string job = "";      ///< the scheduler's id; empty where there is none
  int64_t process = 0;       ///< its number on that host
  std::string machine = "";  ///< the boot and the name space in which `process` counts
  std::string start = "";    ///< random: tells two owners apart; empty: the record cannot be read
  bool ending = false;       ///< it was asked to stop
  int64_t beats = 0;

  std::string to_text() const;
  /// Of any bytes: what is not there stays empty.
  static OwnerRecord parse(const std::string& text);
  /// `host "node1", job "123", process 4711`.
  std::string to_words() const;
};

/// The folder is another process's: trying again does not help.
struct FolderTakenError : Error {
  using Error::Error;
};

struct OwnerTimes {
  std::chrono::milliseconds beat{2'000};
  std::chrono::milliseconds watch{10'000};  ///< whose counter stood still that long is dead
  std::chrono::milliseconds wait{120'000};  ///< for an owner that ends
};

class FolderOwner {
 public:
  struct Folder {
    std::string path;
    std::string words;  ///< for messages: "checkpoint.dir=runs/a"
    std::string fix;    ///< "name another checkpoint.dir"
    std::string job = "";
  };

  /// Takes a folder that is there. Owners of one folder within a process are one. Without a record
  /// nothing is waited for. The record of a process that has ended on this host is replaced at
  /// once, any other one when its counter stood still for `watch`. An owner that was asked to stop,
  /// or is of the same job (a requeued job's predecessor), is waited for. Throws FolderTakenError
  /// (64) naming another owner that lives, FileError where nothing can be written. A stop request
  /// ends every wait with FolderTakenError (75).
  static std::shared_ptr<FolderOwner> take(FileOps& ops, const Folder& folder,
                                           const OwnerTimes& times = {});
  /// Removes the record.
  ~FolderOwner();
  FolderOwner(const FolderOwner&) = delete;
  FolderOwner& operator=(const FolderOwner&) = delete;

  /// Whether another process took the folder, as the last beat saw it. Any thread.
  bool lost() const { return lost_; }
  /// Who took the folder while this process stood still (a suspended job), or nothing. Reads the
  /// record.
  std::optional<OwnerRecord> successor() const;
  /// Throws FolderTakenError (73) where there is a successor.
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
  std::optional<PeriodicTask> beats_;  // last: ends before what it uses
};

}  // namespace ddp::detail
