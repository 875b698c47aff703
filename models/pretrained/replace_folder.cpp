// SPDX-License-Identifier: Apache-2.0
#include "pretrained/replace_folder.hpp"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <regex>
#include <set>
#include <string_view>
#include <system_error>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "pretrained/adapter_config.hpp"
#include "pretrained/model_files.hpp"
#include "pretrained/new_folder.hpp"

namespace models {
namespace detail {
namespace {

namespace fs = std::filesystem;
using ddp::FileOps;

constexpr std::string_view kTemporary = ".tmp-";
constexpr std::string_view kReplaced = ".old-";
constexpr std::size_t kSuffixDigits = 16;

bool is_suffix(std::string_view text) {
  return text.size() == kSuffixDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string beside(const std::string& folder, std::string_view kind, const std::string& suffix) {
  const fs::path path = folder;
  return path.parent_path() / ddp::concat('.', path.filename().string(), kind, suffix);
}

bool is_weights_name(const std::string& name) {
  static const std::regex pattern(
      R"(model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json)");
  return std::regex_match(name, pattern);
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code failed;
  for (fs::directory_iterator it(folder, failed), end; !failed && it != end; it.increment(failed)) {
    entries.push_back(it->path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

/// Temporary or replaced folders of save calls, in the parent of `folder`.
std::vector<fs::path> leftovers(const fs::path& folder, std::string_view kind) {
  const auto begin = ddp::concat('.', folder.filename().string(), kind);
  auto entries = entries_of(parent_of(folder));
  std::erase_if(entries, [&](const fs::path& entry) {
    const auto name = entry.filename().string();
    std::error_code failed;
    return !name.starts_with(begin) || !is_suffix(std::string_view(name).substr(begin.size())) ||
           !fs::is_directory(fs::symlink_status(entry, failed));
  });
  return entries;
}

/// Best effort, because the new folder is complete already.
void remove_but_keep_rest(FileOps& ops, const fs::path& old, const fs::path& folder,
                          const std::function<bool(const std::string&)>& is_ours) {
  std::error_code failed;
  for (const auto& entry : entries_of(old)) {
    const auto place = folder / entry.filename();
    if (is_ours(entry.filename()) && !fs::is_directory(fs::symlink_status(entry, failed))) {
      ops.unlink(entry.c_str());
    } else if (fs::is_directory(folder, failed) && !fs::exists(fs::symlink_status(place, failed))) {
      ops.rename(entry.c_str(), place.c_str());
    }
  }
  if (ops.rmdir(old.c_str()) != 0) {
    ddp::log_warning("some files of " + old.string() + " could not be moved to " + folder.string() +
                     "; fix: move or remove them");
  }
}

[[noreturn]] void fail_replace(const std::string& fresh, const std::string& folder, int error) {
  throw ddp::WriteError("cannot replace " + folder + " by " + fresh + ": " +
                        std::generic_category().message(error));
}

}  // namespace

std::string temporary_beside(const std::string& folder) {
  return beside(folder, kTemporary, ddp::random_suffix());
}

bool is_saved_name(const std::string& name) {
  const auto at = name.rfind(kTemporary);
  if (at != std::string::npos && is_suffix(std::string_view(name).substr(at + kTemporary.size()))) {
    return is_saved_name(name.substr(0, at));
  }
  return name == kAdapterConfig || name == kAdapterWeights || is_weights_name(name) ||
         is_model_file(name);
}

void replace_folder(FileOps& ops, const std::string& fresh, const std::string& folder,
                    const std::function<void()>& on_replaced) {
  std::set<std::string> replaced;
  for (const auto& entry : entries_of(fresh)) {
    replaced.insert(entry.filename());
  }
  std::string old = fresh;
  if (ops.exchange(fresh.c_str(), folder.c_str()) != 0) {
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) {
      fail_replace(fresh, folder, errno);
    }
    old = beside(folder, kReplaced, ddp::random_suffix());
    if (ops.rename(folder.c_str(), old.c_str()) != 0) {
      fail_replace(fresh, folder, errno);
    }
    if (ops.rename(fresh.c_str(), folder.c_str()) != 0) {
      const int error = errno;
      ops.rename(old.c_str(), folder.c_str());
      fail_replace(fresh, folder, error);
    }
  }
  if (on_replaced) {
    on_replaced();
  }
  ddp::sync_folder(ops, parent_of(folder));
  remove_but_keep_rest(ops, old, folder, [&](const std::string& name) {
    return replaced.count(name) != 0 || is_weights_name(name);
  });
}

void restore_replaced(FileOps& ops, const std::string& path) {
  const auto folder = without_slash(path);
  std::error_code failed;
  if (fs::exists(fs::symlink_status(folder, failed))) {
    return;
  }
  const auto replaced = leftovers(folder, kReplaced);
  if (!replaced.empty() && ops.rename(replaced.front().c_str(), folder.c_str()) != 0) {
    throw ddp::WriteError("cannot rename " + replaced.front().string() + " back to " + folder +
                          ": " + std::generic_category().message(errno));
  }
}

void finish_interrupted_save(FileOps& ops, const std::string& path) {
  const auto folder = without_slash(path);
  restore_replaced(ops, folder);
  for (const auto kind : {kReplaced, kTemporary}) {
    for (const auto& leftover : leftovers(folder, kind)) {
      remove_but_keep_rest(ops, leftover, folder, is_saved_name);
    }
  }
}

}  // namespace detail

std::optional<std::string> find_other_file(const std::string& folder) {
  namespace fs = std::filesystem;
  for (const auto& entry : detail::entries_of(folder)) {
    std::error_code failed;
    const auto name = entry.filename().string();
    if (!detail::is_saved_name(name) || !fs::is_regular_file(fs::symlink_status(entry, failed))) {
      return name;
    }
  }
  return std::nullopt;
}

void restore_replaced(const std::string& folder) {
  detail::restore_replaced(ddp::system_file_ops(), folder);
}

void finish_interrupted_save(const std::string& folder) {
  detail::finish_interrupted_save(ddp::system_file_ops(), folder);
}

}  // namespace models
