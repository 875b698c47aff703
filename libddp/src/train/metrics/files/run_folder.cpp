// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/run_folder.hpp"

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// Files that a killed owner of the folder was about to rename.
void remove_unfinished(const std::string& folder) {
  std::error_code ignored;
  std::vector<std::filesystem::path> unfinished;
  for (std::filesystem::directory_iterator it(folder, ignored), end; !ignored && it != end;
       it.increment(ignored)) {
    if (is_unfinished_name(it->path().filename().string())) {
      unfinished.push_back(it->path());
    }
  }
  for (const auto& path : unfinished) {
    system_file_ops().unlink(path.c_str());
  }
}

}  // namespace

RunFolder::RunFolder(const std::string& dir, const std::string& name, const std::string& job,
                     FileOps& ops)
    : ops_(&ops) {
  if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..") {
    throw SettingsError("metrics.run_name=" + name +
                        " is not the name of a folder; fix: leave out '/'");
  }
  path_ = dir + "/" + name;
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  if (error) {
    throw WriteError("cannot make the run folder " + path_ + " (metrics.dir): " + error.message());
  }
  if (const auto why = why_not_own_folder(path_); !why.empty()) {
    throw SettingsError("the run folder " + path_ +
                        " (metrics.dir, metrics.run_name) is refused: " + why +
                        "; fix: set another metrics.run_name, or a metrics.dir of your own");
  }
  try {
    owner_ = FolderOwner::take(
        system_file_ops(),
        {.path = path_,
         .words = concat("the run folder ", path_, " (metrics.dir, metrics.run_name)"),
         .fix = "set another metrics.run_name",
         .job = job});
    remove_unfinished(path_);
  } catch (const FileError& failure) {
    warn_once(kOwnerName, failure.what());
  }
}

void RunFolder::append(const std::string& file, const std::string& line,
                       const std::string& header) {
  if (auto* opened = open(file)) {
    const bool needs_header = !header.empty() && opened->is_empty();
    append_bytes(file, (needs_header ? header + "\n" : "") + line + "\n");
  }
}

void RunFolder::append_bytes(const std::string& file, const std::string& bytes) {
  std::string why;
  if (auto* opened = open(file); opened != nullptr && !opened->append(bytes, why)) {
    warn_once(file, why);
  }
}

AppendedFile* RunFolder::open(const std::string& file) {
  if (!is_ours()) {
    return nullptr;
  }
  auto& opened = open_[file];
  std::string why;
  if (opened == nullptr && (opened = AppendedFile::open(path_ + "/" + file, why)) == nullptr) {
    warn_once(file, why);
  }
  return opened.get();
}

std::string RunFolder::read(const std::string& file) const {
  std::string why;
  return read_start(path_ + "/" + file, SIZE_MAX, why, Links::Refuse).value_or("");
}

void RunFolder::write(const std::string& file, const std::string& text, Durability durability) {
  if (!is_ours()) {
    return;
  }
  open_.erase(file);
  try {
    replace_file(*ops_, path_ + "/" + file, {text}, durability);
  } catch (const WriteError& error) {
    warn_once(file, error.what());
  }
}

bool RunFolder::is_ours() {
  if (owner_ != nullptr && owner_->lost()) {
    warn_once("*", "another run took over the folder while this process was suspended");
    return false;
  }
  return !path_.empty();
}

void RunFolder::warn_once(const std::string& file, const std::string& reason) {
  if (!warned_) {
    warned_ = true;
    log_warning("cannot write " + path_ + "/" + file + ": some metrics of this run are lost" +
                (reason.empty() ? "" : ": " + reason));
  }
}

std::string time_name(const std::string& dir) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d_%H-%M-%S", &parts);
  std::string name = text;
  std::error_code ignored;
  for (int n = 2; std::filesystem::exists(dir + "/" + name, ignored); ++n) {
    name = concat(text, "_", n);
  }
  return name;
}

}  // namespace ddp::detail
