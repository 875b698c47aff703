// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/checkpoint_files.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "core/settings/parse_number.hpp"
#include "train/checkpoint/save_history.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ddp::detail {
namespace {

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kSavingPrefix = ".saving_";
constexpr std::string_view kRemovingPrefix = ".removing_";
constexpr std::string_view kTakeoverPrefix = ".owner.";  // folder_owner.hpp
constexpr std::string_view kTryPrefix = ".try_";

std::string reason(int error) {
  return std::generic_category().message(error);
}

std::string padded(int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "%010lld", static_cast<long long>(step));
  return text;
}

bool parse_count(std::string_view text, int64_t& value) {
  value = parse_number<int64_t>(text).value_or(-1);
  return value >= 0;
}

// "step_0000000120" or "step_0000000120.1"; other names are not checkpoints.
std::optional<CheckpointFolder> parse_folder(const std::string& name) {
  std::string_view rest = name;
  if (!rest.starts_with(kPrefix)) {
    return std::nullopt;
  }
  rest.remove_prefix(kPrefix.size());
  CheckpointFolder folder{.name = name};
  const auto dot = rest.find('.');
  if (dot != std::string_view::npos && !parse_count(rest.substr(dot + 1), folder.repeat)) {
    return std::nullopt;
  }
  if (!parse_count(rest.substr(0, dot), folder.step)) {
    return std::nullopt;
  }
  return folder;
}

bool newer(const CheckpointFolder& a, const CheckpointFolder& b) {
  return std::pair(a.step, a.repeat) > std::pair(b.step, b.repeat);
}

// The first free name of this step: a committed checkpoint is never replaced.
CheckpointFolder free_folder(const std::string& dir, int64_t step) {
  CheckpointFolder folder{.step = step, .name = std::string(kPrefix) + padded(step)};
  std::error_code ignored;
  while (std::filesystem::exists(dir + "/" + folder.name, ignored)) {
    ++folder.repeat;
    folder.name = concat(kPrefix, padded(step), ".", folder.repeat);
  }
  return folder;
}

// Renames the checkpoint to a hidden name first, so that a crash leaves no partial checkpoint under
// a real name.
void remove_checkpoint(FileOps& ops, const std::string& dir, const std::string& name) {
  const std::string hidden = concat(dir, "/", kRemovingPrefix, name, "_", random_suffix());
  if (ops.rename((dir + "/" + name).c_str(), hidden.c_str()) == 0) {
    remove_folder(ops, hidden);
  }
}

// A checkpoint, as its manifest describes it.
struct CheckpointSummary {
  CheckpointFolder folder;
  bool is_readable = false;  // its manifest is
  bool is_complete = false;  // a resume would probably load it
  bool is_finite = false;
  double metric = NAN;
};

// Compares the sizes of a checkpoint's files with its manifest. restore() also compares checksums.
CheckpointSummary inspect(const std::string& dir, const CheckpointFolder& folder) {
  CheckpointSummary result{.folder = folder};
  try {
    const auto manifest = load_manifest(dir, folder);
    result.is_readable = true;
    result.is_complete =
        std::all_of(manifest.files.begin(), manifest.files.end(), [&](const FileRecord& file) {
          std::error_code error;
          const auto size =
              std::filesystem::file_size(dir + "/" + folder.name + "/" + file.name, error);
          return !error && size == file.size;
        });
    result.is_finite = manifest.finite;
    result.metric = manifest.metric.value_or(NAN);
  } catch (const ReadError&) {
    return result;
  }
  return result;
}

// Checkpoints with a metric, the best first: finite before others, and of equal metrics the order
// of `checkpoints`.
std::vector<CheckpointSummary> sorted_by_metric(std::vector<CheckpointSummary> checkpoints,
                                                bool is_max) {
  std::erase_if(checkpoints,
                [](const CheckpointSummary& checkpoint) { return std::isnan(checkpoint.metric); });
  std::stable_sort(checkpoints.begin(), checkpoints.end(),
                   [is_max](const CheckpointSummary& a, const CheckpointSummary& b) {
                     if (a.is_finite != b.is_finite) {
                       return a.is_finite;
                     }
                     return is_max ? a.metric > b.metric : a.metric < b.metric;
                   });
  return checkpoints;
}

// The part of the path that exists and is not a folder; empty if there is none.
std::string blocking_file(const std::string& dir) {
  std::error_code ignored;
  for (std::filesystem::path part = dir; !part.empty(); part = part.parent_path()) {
    if (std::filesystem::exists(part, ignored)) {
      return std::filesystem::is_directory(part, ignored) ? "" : part.string();
    }
    if (part == part.parent_path()) {
      break;
    }
  }
  return "";
}

// Appended to the message of a FileError.
constexpr const char* kOtherFolder = ", or set another checkpoint.dir";

// Adds kOtherFolder to the disk errors that `write` throws.
template <typename F>
auto with_other_folder(F&& write) {
  try {
    return write();
  } catch (const FileError& error) {
    throw WriteError(error.what() + std::string(kOtherFolder));
  }
}

}  // namespace

void make_folders(FileOps& ops, const std::string& dir) {
  for (std::size_t end = dir.find('/', 1);; end = dir.find('/', end + 1)) {
    const std::string part = dir.substr(0, end);
    if (ops.mkdir(part.c_str(), 0777) == 0) {
      const auto above = std::filesystem::path(part).parent_path().string();
      sync_folder(ops, above.empty() ? "." : above);
    } else if (errno != EEXIST) {
      const int error = errno;
      std::error_code ignored;
      if (!std::filesystem::is_directory(part, ignored)) {
        throw FileError("cannot make the folder " + part, error);
      }
    }
    if (end == std::string::npos) {
      return;
    }
  }
}

void try_writing(FileOps& ops, const std::string& dir) {
  const auto name = concat(kTryPrefix, random_suffix());
  write_new_file(ops, dir, name, {"x"});
  ops.unlink((dir + "/" + name).c_str());
}

std::string begin_save(FileOps& ops, const std::string& dir, int64_t step) {
  make_folders(ops, dir);
  const std::string name = concat(kSavingPrefix, padded(step), "_", random_suffix());
  if (ops.mkdir((dir + "/" + name).c_str(), 0777) != 0) {
    throw FileError("cannot make a folder in " + dir, errno);
  }
  return name;
}

CheckpointFolder commit_save(FileOps& ops, const std::string& dir, const std::string& saving,
                             const Manifest& manifest) {
  const std::string from = dir + "/" + saving;
  CheckpointFolder folder;
  try {
    const std::string text = manifest_to_json(manifest);
    write_new_file(ops, from, kManifestName, {text});
    sync_folder(ops, from);
    folder = free_folder(dir, manifest.step);
    if (ops.rename(from.c_str(), (dir + "/" + folder.name).c_str()) != 0) {
      throw FileError("cannot commit " + dir + "/" + folder.name, errno);
    }
  } catch (...) {
    remove_folder(ops, from);
    throw;
  }
  // The checkpoint is visible and complete now; it may still be lost in a power failure.
  sync_folder(ops, dir);
  return folder;
}

std::vector<CheckpointFolder> list_checkpoints(const std::string& dir) {
  std::vector<CheckpointFolder> folders;
  std::error_code error;
  std::filesystem::directory_iterator it(dir, error);
  for (const std::filesystem::directory_iterator end; !error && it != end; it.increment(error)) {
    if (auto folder = parse_folder(it->path().filename().string())) {
      folders.push_back(std::move(*folder));
    }
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    if (const auto file = blocking_file(dir); !file.empty()) {
      throw SettingsError(concat("checkpoint.dir=", dir, " cannot be a folder: ", file,
                                 " is a file; fix: set the path of a folder"));
    }
    throw ReadError("cannot list the checkpoint folder " + dir + " (checkpoint.dir): " +
                    error.message() + "; fix: let this user read it, or set another one");
  }
  std::sort(folders.begin(), folders.end(), newer);
  return folders;
}

Manifest load_manifest(const std::string& dir, const CheckpointFolder& checkpoint) {
  const std::string path = dir + "/" + checkpoint.name + "/" + kManifestName;
  std::string why;
  // parse_manifest refuses more than 16 MiB.
  const auto text = read_start(path, (16u << 20) + 1, why, Links::Refuse);
  if (!text) {
    throw ReadError(path + " cannot be read: " + why);
  }
  auto manifest = parse_manifest(*text, path);
  if (manifest.step != checkpoint.step) {
    throw ReadError(
        concat(path, " has step ", manifest.step, ", but its folder has step ", checkpoint.step));
  }
  return manifest;
}

std::optional<std::string> find_damage(const std::string& folder, const FileRecord& file) {
  const std::string path = folder + "/" + file.name;
  std::string why;
  const int fd = open_to_read(path, why, Links::Refuse);
  if (fd < 0) {
    return path + (errno == ENOENT ? " is missing" : " cannot be opened: " + why);
  }
  struct stat status {};
  if (::fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) != file.size) {
    ::close(fd);
    return concat(path, " has ", status.st_size, " bytes, but its manifest lists ", file.size);
  }
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  // A small buffer for a small file, because the buffer is cleared first.
  const auto capacity = static_cast<std::size_t>(std::min<uint64_t>(file.size + 1, 4u << 20));
  const auto buffer = std::make_unique<char[]>(capacity);
  ssize_t count = 0;
  while ((count = ::read(fd, buffer.get(), capacity)) > 0 || (count < 0 && errno == EINTR)) {
    XXH3_64bits_update(&hash, buffer.get(), static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  }
  const int error = count < 0 ? errno : 0;
  ::close(fd);
  if (error != 0) {
    return path + " cannot be read: " + reason(error);
  }
  if (XXH3_64bits_digest(&hash) != file.xxh3) {
    return path + " is damaged: its checksum differs from the manifest's";
  }
  return std::nullopt;
}

Manifest check_checkpoint(const std::string& dir, const CheckpointFolder& checkpoint,
                          const std::function<bool(const std::string& file)>& wanted) {
  auto manifest = load_manifest(dir, checkpoint);
  for (const auto& file : manifest.files) {
    if (!wanted || wanted(file.name)) {
      if (const auto damage = find_damage(dir + "/" + checkpoint.name, file)) {
        throw ReadError(*damage);
      }
    }
  }
  return manifest;
}

std::vector<std::string> prune_checkpoints(FileOps& ops, const std::string& dir,
                                           const CheckpointFolder& newest,
                                           const Retention& retention) {
  std::vector<CheckpointSummary> checkpoints;
  for (const auto& folder : list_checkpoints(dir)) {
    if (newer(folder, newest)) {
      continue;
    }
    auto& checkpoint = checkpoints.emplace_back(inspect(dir, folder));
    checkpoint.is_complete =
        folder == newest || (checkpoint.is_complete && retention.damaged.count(folder.name) == 0);
    if (!checkpoint.is_complete) {  // a damaged one is neither finite nor the best
      checkpoint.is_finite = false;
      checkpoint.metric = NAN;
    }
  }
  std::string best;
  if (retention.keep_best) {
    const auto sorted = sorted_by_metric(checkpoints, retention.best_is_max);
    best = sorted.empty() ? "" : sorted.front().folder.name;
  }
  // Damaged checkpoints do not count towards keep_last. They are removed once keep_last newer
  // complete ones exist.
  std::vector<std::string> removed;
  int64_t kept = 0, kept_finite = 0;
  for (const auto& checkpoint : checkpoints) {
    const auto& name = checkpoint.folder.name;
    if ((checkpoint.is_finite ? kept_finite : kept) >= retention.keep_last && name != best) {
      remove_checkpoint(ops, dir, name);
      removed.push_back(name);
    } else {
      kept += checkpoint.is_complete ? 1 : 0;
      kept_finite += checkpoint.is_finite ? 1 : 0;
    }
  }
  return removed;
}

std::vector<CheckpointFolder> best_first(const CheckpointOptions& options,
                                         const std::vector<CheckpointFolder>& folders) {
  std::vector<CheckpointSummary> checkpoints;
  for (const auto& folder : folders) {
    checkpoints.push_back(inspect(options.dir, folder));
  }
  // One that cannot be read may be the best: restore() then says so before it takes another one.
  std::vector<CheckpointFolder> best;
  for (const auto& checkpoint : checkpoints) {
    if (!checkpoint.is_readable) {
      best.push_back(checkpoint.folder);
    }
  }
  for (const auto& checkpoint : sorted_by_metric(checkpoints, options.keep_best == KeepBest::Max)) {
    best.push_back(checkpoint.folder);
  }
  return best;
}

void remove_stale_saves(FileOps& ops, const std::string& dir) noexcept {
  try {
    std::vector<std::string> folders, files;
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with(kSavingPrefix) || name.starts_with(kRemovingPrefix)) {
        folders.push_back(entry.path().string());
      } else if (name.starts_with(kTakeoverPrefix) || name.starts_with(kTryPrefix)) {
        files.push_back(entry.path().string());
      }
    }
    for (const auto& path : files) {
      ops.unlink(path.c_str());
    }
    for (const auto& path : folders) {
      remove_folder(ops, path);
    }
  } catch (const std::exception&) {
    return;  // leftovers only cost space
  }
}

CheckpointDir::CheckpointDir(FileOps& ops, const CheckpointOptions& options, std::string job)
    : ops_(ops),
      path_(options.dir),
      job_(std::move(job)),
      kept_{.keep_last = options.keep_last,
            .keep_best = options.keep_best != KeepBest::Off,
            .best_is_max = options.keep_best == KeepBest::Max} {}

void CheckpointDir::take_ownership() {
  const auto words = concat("checkpoint.dir=", path_);
  try {
    make_folders(ops_, path_);
    owner_ = FolderOwner::take(
        ops_, {.path = path_, .words = words, .fix = "set another checkpoint.dir", .job = job_});
  } catch (const FileError& error) {
    throw WriteError(concat(words, ": ", error.what(), kOtherFolder));
  }
}

std::vector<CheckpointFolder> CheckpointDir::open(bool leave_untouched) {
  auto folders = list_checkpoints(path_);
  if (!leave_untouched) {
    take_ownership();
    remove_stale_saves(ops_, path_);
    folders = list_checkpoints(path_);  // the previous owner may have saved until now
  }
  return folders;
}

// Nodes may mount the folder differently.
void CheckpointDir::require_writable(ControlPlane& control_plane) const {
  std::string reason;
  if (control_plane.rank() != 0) {
    try {
      try_writing(ops_, path_);
    } catch (const FileError& error) {
      reason = error.what();
    }
  }
  const auto reasons = control_plane.all_gather(reason);
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (!reasons[rank].empty()) {
      throw SaveFailure(static_cast<int>(rank), concat("checkpoint.dir=", path_, ": rank ", rank,
                                                       " ", reasons[rank], kOtherFolder));
    }
  }
}

std::string CheckpointDir::begin_save(int64_t done) {
  if (owner_ == nullptr) {
    take_ownership();
  }
  owner_->require_own();
  return with_other_folder([&] { return ddp::detail::begin_save(ops_, path_, done); });
}

FileRecord CheckpointDir::write_file(const std::string& saving, const std::string& name,
                                     const std::vector<std::string_view>& chunks) const {
  return with_other_folder([&] { return write_new_file(ops_, path_of(saving), name, chunks); });
}

void CheckpointDir::discard_save(const std::string& saving) const {
  remove_folder(ops_, path_of(saving));
}

std::string CheckpointDir::commit(const std::string& saving, const Manifest& manifest,
                                  const Retention& retention) const {
  owner_->require_own();
  const auto made = with_other_folder([&] { return commit_save(ops_, path_, saving, manifest); });
  prune_checkpoints(ops_, path_, made, retention);
  return made.name;
}

Retention CheckpointDir::retention() const {
  auto retention = kept_;
  retention.damaged = damaged_;
  return retention;
}

}  // namespace ddp::detail
