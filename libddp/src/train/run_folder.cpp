// SPDX-License-Identifier: Apache-2.0
#include "train/run_folder.hpp"

#include <ctime>
#include <filesystem>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

RunFolder::RunFolder(const std::string& dir, const std::string& name) {
  if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..") {
    throw SettingsError("metrics.run_name=" + name + " is not a folder's name: leave out '/'");
  }
  path_ = dir + "/" + name;
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  if (error) {
    throw WriteError("cannot make the run folder " + path_ + " (metrics.dir): " + error.message());
  }
}

void RunFolder::append(const std::string& file, const std::string& line,
                       const std::string& header) {
  if (path_.empty()) {
    return;
  }
  auto [it, opened] = open_.try_emplace(file);
  auto& out = it->second;
  if (opened) {
    std::error_code ignored;
    const auto path = path_ + "/" + file;
    const bool fresh = std::filesystem::file_size(path, ignored) == 0 || ignored;
    out.open(path, std::ios::app);
    if (fresh && !header.empty()) {
      out << header << "\n";
    }
  }
  out << line << "\n" << std::flush;
  if (!out) {
    out.clear();  // the next line may fit again
    warn_once(file);
  }
}

void RunFolder::write(const std::string& file, const std::string& text) {
  if (path_.empty()) {
    return;
  }
  std::ofstream out(path_ + "/" + file, std::ios::trunc);
  out << text << std::flush;
  if (!out) {
    warn_once(file);
  }
}

void RunFolder::warn_once(const std::string& file) {
  if (!warned_) {
    warned_ = true;
    log_warning("cannot write " + path_ + "/" + file + ": some of this run's numbers are lost");
  }
}

std::string time_name() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d_%H-%M-%S", &parts);
  return text;
}

}  // namespace ddp::detail
