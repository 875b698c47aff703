// SPDX-License-Identifier: Apache-2.0
// A model of a file system between memory and disk. It records every system call of a save. It
// reproduces each possible state of the disk if the process dies or the power fails after any of
// them.
//
// fsync promises only this: fsync(file) makes the file's data survive; fsync(folder) makes the
// folder's entries (creations, renames, removals in it) survive. Anything else may be lost or kept.
#pragma once

#include <fcntl.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/files/file_ops.hpp"
#include "unit/train/temporary_folder.hpp"

namespace testing {

/// Forwards every call to the system and records it.
class RecordingOps : public ddp::FileOps {
 public:
  enum class Kind { Mkdir, Create, Write, SyncFile, SyncFolder, Rename, Unlink, Rmdir };
  struct Call {
    Kind kind;
    std::string path;
    std::string other;  ///< rename: to; write: the data
  };
  std::vector<Call> calls;

  int open(const char* path, int flags, mode_t mode) override {
    const int fd = FileOps::open(path, flags, mode);
    if (fd >= 0) {
      paths_[fd] = {path, (flags & O_DIRECTORY) != 0};
      if ((flags & O_CREAT) != 0) {
        calls.push_back({Kind::Create, path, ""});
      }
    }
    return fd;
  }
  ssize_t write(int fd, const void* data, std::size_t size) override {
    const auto written = FileOps::write(fd, data, size);
    calls.push_back({Kind::Write,
                     paths_.at(fd).first,
                     {static_cast<const char*>(data), static_cast<std::size_t>(written)}});
    return written;
  }
  int fsync(int fd) override {
    const auto& [path, folder] = paths_.at(fd);
    calls.push_back({folder ? Kind::SyncFolder : Kind::SyncFile, path, ""});
    return FileOps::fsync(fd);
  }
  int rename(const char* from, const char* to) override {
    return note({Kind::Rename, from, to}, FileOps::rename(from, to));
  }
  int mkdir(const char* path, mode_t mode) override {
    return note({Kind::Mkdir, path, ""}, FileOps::mkdir(path, mode));
  }
  int unlink(const char* path) override {
    return note({Kind::Unlink, path, ""}, FileOps::unlink(path));
  }
  int rmdir(const char* path) override {
    return note({Kind::Rmdir, path, ""}, FileOps::rmdir(path));
  }

 private:
  int note(Call call, int result) {
    if (result == 0) {
      calls.push_back(std::move(call));
    }
    return result;
  }
  std::map<int, std::pair<std::string, bool>> paths_;
};

/// Replays calls over a starting tree, inode by inode.
class CrashModel {
 public:
  using Kind = RecordingOps::Kind;

  /// `root` as on the disk now, all of it durable.
  explicit CrashModel(const std::string& root) : root_(root) { read_tree(); }

  void apply(const RecordingOps::Call& call) {
    switch (call.kind) {
      case Kind::Mkdir:
      case Kind::Create: {
        inodes_.push_back({});
        inodes_.back().folder = call.kind == Kind::Mkdir;
        add_change({parent(call.path), name(call.path), static_cast<int>(inodes_.size()) - 1});
        break;
      }
      case Kind::Write:
        inodes_[find(call.path)].data += call.other;
        break;
      case Kind::SyncFile:
        inodes_[find(call.path)].synced = inodes_[find(call.path)].data.size();
        break;
      case Kind::SyncFolder: {
        const int folder = find(call.path);
        for (auto& change : changes_) {
          change.durable =
              change.durable || change.folder == folder || change.from_folder == folder;
        }
        break;
      }
      case Kind::Rename: {
        Change change{parent(call.other), name(call.other), find(call.path)};
        change.from_folder = parent(call.path);
        change.from_name = name(call.path);
        add_change(change);
        break;
      }
      case Kind::Unlink:
      case Kind::Rmdir:
        add_change({parent(call.path), name(call.path), -1});
        break;
    }
  }

  /// Numbers of the entry changes that a power loss may undo.
  std::vector<std::size_t> open_changes() const {
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      if (!changes_[i].durable) {
        open.push_back(i);
      }
    }
    return open;
  }

  /// Writes into `target` the tree in which only `kept` survived of the open changes, and the share
  /// `data_kept` of unsynced data.
  void write_state(const std::string& target, const std::set<std::size_t>& kept,
                   double data_kept) const {
    auto folders = start_entries_;
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      if (changes_[i].durable || kept.count(i) != 0) {
        apply_entry(folders, changes_[i]);
      }
    }
    write_folder(folders, 0, target, data_kept);
  }

 private:
  struct Inode {
    bool folder = false;
    std::string data = "";
    std::size_t synced = 0;
  };
  struct Change {
    int folder;
    std::string entry;
    int inode;  ///< -1: removed
    int from_folder = -1;
    std::string from_name = "";
    bool durable = false;
  };
  using Entries = std::map<int, std::map<std::string, int>>;

  void read_tree() {
    std::vector<std::pair<std::string, int>> open{{root_, 0}};
    inodes_.push_back({.folder = true});
    while (!open.empty()) {
      const auto [folder, number] = open.back();
      open.pop_back();
      for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        const int child = static_cast<int>(inodes_.size());
        Inode inode{.folder = entry.is_directory()};
        if (inode.folder) {
          open.push_back({entry.path().string(), child});
        } else {
          inode.data = read_file(entry.path().string());
          inode.synced = inode.data.size();
        }
        inodes_.push_back(inode);
        start_entries_[number][entry.path().filename().string()] = child;
      }
    }
    entries_ = start_entries_;
  }

  static void apply_entry(Entries& folders, const Change& change) {
    if (change.from_folder >= 0) {
      auto& from = folders[change.from_folder];
      const auto it = from.find(change.from_name);
      if (it != from.end() && it->second == change.inode) {
        from.erase(it);
      }
    }
    if (change.inode < 0) {
      folders[change.folder].erase(change.entry);
    } else {
      folders[change.folder][change.entry] = change.inode;
    }
  }
  void add_change(Change change) {
    apply_entry(entries_, change);
    changes_.push_back(std::move(change));
  }

  void write_folder(const Entries& folders, int number, const std::string& target,
                    double data_kept) const {
    std::filesystem::create_directories(target);
    const auto entries = folders.find(number);
    if (entries == folders.end()) {
      return;
    }
    for (const auto& [entry, child] : entries->second) {
      const auto& inode = inodes_[child];
      if (inode.folder) {
        write_folder(folders, child, target + "/" + entry, data_kept);
      } else {
        const auto open = static_cast<double>(inode.data.size() - inode.synced);
        write_file(target + "/" + entry,
                   inode.data.substr(0, inode.synced + static_cast<std::size_t>(open * data_kept)));
      }
    }
  }

  int find(const std::string& path) const {
    int number = 0;
    for (const auto& part : std::filesystem::path(path).lexically_relative(root_)) {
      if (part != ".") {
        number = entries_.at(number).at(part.string());
      }
    }
    return number;
  }
  int parent(const std::string& path) const {
    return find(std::filesystem::path(path).parent_path().string());
  }
  static std::string name(const std::string& path) {
    return std::filesystem::path(path).filename().string();
  }

  std::string root_;
  std::vector<Inode> inodes_;
  Entries start_entries_;
  Entries entries_;
  std::vector<Change> changes_;
};

}  // namespace testing
