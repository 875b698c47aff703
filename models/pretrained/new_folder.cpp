// SPDX-License-Identifier: Apache-2.0
#include "pretrained/new_folder.hpp"

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "ddp/core/error.hpp"
#include "ddp/detail/files.hpp"
#include "pretrained/replace_folder.hpp"

namespace models::detail {
namespace {

namespace fs = std::filesystem;
using ddp::system_file_ops;

// Resolves a link: a rename would replace the link instead of its target.
std::string followed(std::string path) {
  std::error_code error;
  const bool is_link = fs::is_symlink(fs::symlink_status(path, error));
  return is_link && fs::is_directory(path, error) ? fs::canonical(path).string() : path;
}

}  // namespace

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') {
    path.pop_back();
  }
  return path;
}

std::string parent_of(const std::string& path) {
  const auto parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool holds_files(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error) && !fs::is_empty(path, error);
}

NewFolder::NewFolder(std::string path, bool replaces)
    : path_(followed(without_slash(std::move(path)))), replaces_(replaces) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(path_, error)) &&
      (!fs::is_directory(path_, error) || (!replaces && holds_files(path_)))) {
    throw ddp::SettingsError(path_ + " already exists; fix: name a new folder, or remove it");
  }
  fs::create_directories(parent_of(path_), error);
  temporary_ = temporary_beside(path_);
  if (system_file_ops().mkdir(temporary_.c_str(), 0777) != 0) {
    throw ddp::WriteError("cannot create the folder " + temporary_ + ": " +
                          std::generic_category().message(errno));
  }
}

NewFolder::~NewFolder() {
  if (!committed_) {
    ddp::remove_folder(system_file_ops(), temporary_);
  }
}

void NewFolder::write(const std::string& name, std::string_view text) {
  ddp::write_new_file(system_file_ops(), temporary_, name, {text}, ddp::kPublicFile);
}

void NewFolder::commit() {
  auto& ops = system_file_ops();
  ddp::sync_folder(ops, temporary_);
  if (replaces_ && holds_files(path_)) {
    replace_folder(ops, temporary_, path_, [this] { committed_ = true; });
    return;
  }
  // Replaces an empty folder of that name, but not one that was filled meanwhile.
  if (ops.rename(temporary_.c_str(), path_.c_str()) != 0) {
    throw ddp::WriteError("cannot rename the finished folder " + temporary_ + " to " + path_ +
                          ": " + std::generic_category().message(errno));
  }
  committed_ = true;
  ddp::sync_folder(ops, parent_of(path_));
}

}  // namespace models::detail
