// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/folder_owner.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "core/control/wire/tcp_socket.hpp"
#include "core/launch/training_state.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;
using OwnerJson = nlohmann::json;

// A record is overwritten in place by a record of the same length.
constexpr std::size_t kRecordBytes = 2048;
constexpr std::size_t kWordBytes = 128;

std::string as_json(const std::string& text) {
  return OwnerJson(text.substr(0, kWordBytes))
      .dump(-1, ' ', /*ensure_ascii=*/true, OwnerJson::error_handler_t::replace);
}

// The scope in which a process id is unique.
std::string this_machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const auto space = std::filesystem::read_symlink("/proc/self/ns/pid", error);
  return boot.empty() || error ? "" : boot + " " + space.string();
}

// At most a record's bytes. On failure errno has the reason.
std::optional<std::string> read_record(int fd) {
  std::array<char, kRecordBytes> bytes{};
  ssize_t size = 0;
  do {
    size = ::pread(fd, bytes.data(), bytes.size(), 0);
  } while (size < 0 && errno == EINTR);
  return size < 0 ? std::nullopt
                  : std::optional(std::string(bytes.data(), static_cast<std::size_t>(size)));
}

// Returns nothing if there is no record.
std::optional<std::string> read_record(const std::string& path) {
  std::string why;
  auto text = read_start(path, kRecordBytes, why, Links::Refuse);
  if (!text && errno != ENOENT) {
    throw FileError("cannot read " + path, errno);
  }
  return text;
}

bool has_ended(const OwnerRecord& record, const OwnerRecord& here) {
  return !here.machine.empty() && record.machine == here.machine && record.host == here.host &&
         record.process > 0 && record.process <= std::numeric_limits<pid_t>::max() &&
         ::kill(static_cast<pid_t>(record.process), 0) != 0 && errno == ESRCH;
}

}  // namespace

std::string OwnerRecord::to_text() const {
  auto text =
      concat("{\"host\":", as_json(host), ",\"job\":", as_json(job), ",\"process\":", process,
             ",\"machine\":", as_json(machine), ",\"start\":", as_json(start),
             ",\"ending\":", ending ? "true" : "false", ",\"beats\":", beats, "}\n");
  text.insert(text.size() - 1, kRecordBytes - std::min(text.size(), kRecordBytes), ' ');
  return text;
}

OwnerRecord OwnerRecord::parse(const std::string& text) {
  OwnerRecord record;
  try {
    const auto json = OwnerJson::parse(text);
    record.host = json.at("host").get<std::string>();
    record.job = json.at("job").get<std::string>();
    const auto& process = json.at("process");
    record.process = process.is_number_integer() ? process.get<int64_t>() : 0;
    record.machine = json.at("machine").get<std::string>();
    record.ending = json.at("ending").get<bool>();
    record.start = json.at("start").get<std::string>();
  } catch (const OwnerJson::exception&) {
    record.start.clear();
  }
  return record;
}

std::string OwnerRecord::to_words() const {
  return start.empty()
             ? "an owner whose record cannot be read"
             : concat("host ", as_json(host), job.empty() ? "" : concat(", job ", as_json(job)),
                      ", process ", process);
}

FolderOwner::FolderOwner(FileOps& ops, const Folder& folder, const OwnerTimes& times)
    : ops_(ops), folder_(folder), path_(folder.path + "/" + kOwnerName), times_(times) {
  own_ = {.host = host_name(),
          .job = folder.job.substr(0, kWordBytes),
          .process = ::getpid(),
          .machine = this_machine(),
          .start = random_suffix(),
          .ending = is_stop_requested()};
}

std::shared_ptr<FolderOwner> FolderOwner::take(FileOps& ops, const Folder& folder,
                                               const OwnerTimes& times) {
  std::error_code error;
  const auto place = std::filesystem::canonical(folder.path, error);
  if (error) {
    throw FileError("cannot open the folder " + folder.path, error.value());
  }
  static std::mutex mutex;  // guards the owners of this process
  static std::map<std::string, std::weak_ptr<FolderOwner>> owners;
  {
    const std::lock_guard lock(mutex);
    if (auto owner = owners[place.string()].lock()) {
      return owner;
    }
  }
  const std::shared_ptr<FolderOwner> owner(new FolderOwner(ops, folder, times));
  owner->claim();
  owner->beats_.emplace([self = owner.get()] { self->beat(); }, times.beat);
  const std::lock_guard lock(mutex);
  owners[place.string()] = owner;
  return owner;
}

FolderOwner::~FolderOwner() {
  beats_.reset();
  try {
    const auto text = read_record(path_);
    if (text && OwnerRecord::parse(*text).start == own_.start) {
      ops_.unlink(path_.c_str());
    }
  } catch (const std::exception&) {
    return;  // the next owner detects that the counter stands still
  }
}

// Polls the record until this process owns the folder.
void FolderOwner::claim() {
  std::string last;
  bool moved = false, logged_watch = false, logged_wait = false;
  const auto begin = Clock::now();
  for (auto changed = begin;; std::this_thread::sleep_for(times_.beat / 8)) {
    const auto text = read_record(path_);
    if (!text) {
      if (create()) {
        return;
      }
      continue;  // another process was faster
    }
    const auto other = OwnerRecord::parse(*text);
    if (*text != last) {
      moved = !last.empty();
      last = *text;
      changed = Clock::now();
    }
    if (has_ended(other, own_) || Clock::now() - changed >= times_.watch) {
      if (replace(last)) {
        log_info(concat("took over ", folder_.words, " from ", other.to_words(),
                        ", which no longer runs"));
        return;
      }
      continue;
    }
    require_no_stop(other);
    if (!moved) {
      if (!std::exchange(logged_watch, true)) {
        log_info(concat("waiting at most ", times_.watch.count() / 1000, " s to find out whether ",
                        other.to_words(), " still runs and owns ", folder_.words));
      }
      continue;
    }
    const bool ends = other.ending || (!own_.job.empty() && other.job == own_.job);
    if (!ends || Clock::now() - begin >= times_.wait) {
      throw FolderTakenError(
          ExitCode::Settings,
          concat(folder_.words, " is in use by ", other.to_words(), ", whose counter in ", path_,
                 " moves; fix: end that job first, or ", folder_.fix));
    }
    if (!std::exchange(logged_wait, true)) {
      log_info(concat("waiting at most ", times_.wait.count() / 1000, " s for the end of ",
                      other.to_words(), ", which owns ", folder_.words));
    }
  }
}

// Not ddp::Stop: only rank 0 waits, and ddp::run publishes every other error to the other ranks.
void FolderOwner::require_no_stop(const OwnerRecord& other) const {
  if (is_stop_requested()) {
    throw FolderTakenError(
        ExitCode::SavedRequeue,
        concat("a stop was requested while this process waited for ", folder_.words,
               ", which is in use by ", other.to_words(), "; fix: start the run again"));
  }
}

// False if another process made a record first.
bool FolderOwner::create() {
  try {
    write_new_file(ops_, folder_.path, kOwnerName, {own_.to_text()}, kPublicFile);
    return true;
  } catch (const FileError& error) {
    if (error.error != EEXIST) {
      throw;
    }
    return false;
  }
}

// False if the record is no longer `seen`. If two processes replace the record at the same time,
// the later process wins, and the other one detects this at its next read.
bool FolderOwner::replace(const std::string& seen) {
  const std::string name = concat(kOwnerName, ".", own_.start);
  const std::string temporary = folder_.path + "/" + name;
  write_new_file(ops_, folder_.path, name, {own_.to_text()}, kPublicFile);
  if (read_record(path_) != seen || ops_.rename(temporary.c_str(), path_.c_str()) != 0) {
    ops_.unlink(temporary.c_str());
    return false;
  }
  std::this_thread::sleep_for(times_.beat / 8);
  return !successor();
}

// On the beating thread. Failures are retried at the next beat.
void FolderOwner::beat() {
  const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    if (errno == ENOENT) {  // the folder was emptied
      try {
        create();
      } catch (const std::exception&) {
        return;
      }
    }
    return;
  }
  // Reads and writes through one descriptor: if the record is replaced meanwhile, the write goes to
  // the old record.
  const auto text = read_record(fd);
  const auto start = text ? OwnerRecord::parse(*text).start : "";
  lost_ = !start.empty() && start != own_.start;
  if (start == own_.start) {
    ++own_.beats;
    own_.ending = is_stop_requested();
    const auto record = own_.to_text();
    [[maybe_unused]] const auto written = ::pwrite(fd, record.data(), record.size(), 0);
  }
  ::close(fd);
}

std::optional<OwnerRecord> FolderOwner::successor() const {
  std::optional<std::string> text;
  try {
    text = read_record(path_);
  } catch (const FileError&) {
    return std::nullopt;  // no evidence of another owner
  }
  auto record = text ? OwnerRecord::parse(*text) : OwnerRecord();
  return record.start.empty() || record.start == own_.start ? std::nullopt
                                                            : std::optional(std::move(record));
}

void FolderOwner::require_own() const {
  if (const auto other = successor()) {
    throw FolderTakenError(
        ExitCode::CannotWrite,
        concat(folder_.words, " was taken over by ", other->to_words(),
               " while this process was suspended; fix: end one of the two jobs, or ",
               folder_.fix));
  }
}

}  // namespace ddp::detail
