// SPDX-License-Identifier: Apache-2.0
#include "train/run_folder.hpp"

#include <cerrno>
#include <ctime>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

RunFolder::RunFolder(const std::string& dir, const std::string& name, const std::string& job) {
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
  try {
    owner_ = FolderOwner::take(
        system_file_ops(),
        {.path = path_,
         .words = concat("the run folder ", path_, " (metrics.dir, metrics.run_name)"),
         .fix = "set another metrics.run_name",
         .job = job});
  } catch (const FileError& failure) {
    warn_once(kOwnerName, failure.what());
  }
}

void RunFolder::append(const std::string& file, const std::string& line,
                       const std::string& header) {
  std::error_code ignored;
  const bool fresh = !open_.contains(file) &&
                     (std::filesystem::file_size(path_ + "/" + file, ignored) == 0 || ignored);
  append_bytes(file, (fresh && !header.empty() ? header + "\n" : "") + line + "\n");
}

void RunFolder::append_bytes(const std::string& file, const std::string& bytes) {
  if (!is_ours()) {
    return;
  }
  const auto path = path_ + "/" + file;
  auto& [out, size] = open_[file];
  std::error_code error;
  if (!out.is_open()) {
    size = std::filesystem::file_size(path, error);
    size = error ? 0 : size;
    out.open(path, std::ios::app | std::ios::binary);
  }
  errno = 0;
  out << bytes << std::flush;
  if (out) {
    size += bytes.size();
    return;
  }
  warn_once(file, errno != 0 ? std::generic_category().message(errno) : "");
  // A part may have been written. Without it the next line, which may succeed, is whole.
  const auto whole = size;
  open_.erase(file);
  std::filesystem::resize_file(path, whole, error);
}

std::string RunFolder::read(const std::string& file) const {
  std::ifstream in(path_ + "/" + file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void RunFolder::write(const std::string& file, const std::string& text) {
  if (!is_ours()) {
    return;
  }
  open_.erase(file);
  const auto path = path_ + "/" + file;
  const auto unfinished = path + ".new";
  std::ofstream out(unfinished, std::ios::trunc);
  out << text << std::flush;
  std::error_code error;
  if (out) {
    std::filesystem::rename(unfinished, path, error);
  }
  if (!out || error) {
    warn_once(file);
    std::filesystem::remove(unfinished, error);
  }
}

bool RunFolder::keep_copy(const std::string& file) {
  if (!is_ours()) {
    return false;
  }
  std::error_code error;
  for (int n = 1; aside_.empty(); ++n) {
    const auto path = concat(path_, "/attempt-", n);
    if (!std::filesystem::exists(path, error)) {
      std::filesystem::create_directory(path, error);
      aside_ = path;
    }
  }
  std::filesystem::copy_file(path_ + "/" + file, aside_ + "/" + file, error);
  if (error) {
    warn_once(aside_.substr(path_.size() + 1) + "/" + file, error.message());
  }
  return !error;
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
