// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/logging.hpp"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/files/file_ops.hpp"
#include "core/log/log_file.hpp"
#include "core/log/terminal_line.hpp"
#include "ddp/detail/text.hpp"

namespace ddp {
namespace {

constexpr auto kPattern = "[%H:%M:%S.%e] [%l] %v";
std::atomic<int> shown_rank{-1};

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::Debug:
      return spdlog::level::debug;
    case LogLevel::Info:
      return spdlog::level::info;
    case LogLevel::Warning:
      return spdlog::level::warn;
    case LogLevel::Error:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

void apply_environment_level(spdlog::level::level_enum& level) {
  const char* text = std::getenv("DDP_LOG_LEVEL");
  if (text == nullptr) {
    return;
  }
  const std::string_view name(text);
  if (name == "debug") {
    level = spdlog::level::debug;
  } else if (name == "info") {
    level = spdlog::level::info;
  } else if (name == "warning") {
    level = spdlog::level::warn;
  } else if (name == "error") {
    level = spdlog::level::err;
  } else {
    std::fprintf(stderr, "DDP_LOG_LEVEL=%s is unknown; fix: use debug, info, warning or error\n",
                 detail::printable(text).c_str());
  }
}

// Leaked on purpose: threads may log while static objects are destroyed.
spdlog::logger& logger() {
  static auto* instance = [] {
    auto* made = new spdlog::logger("ddp", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern(kPattern);
    made->flush_on(spdlog::level::debug);
    spdlog::level::level_enum level = spdlog::level::info;
    apply_environment_level(level);
    made->set_level(level);
    return made;
  }();
  return *instance;
}

struct Terminal {
  std::mutex mutex;
  std::string last_line;
};

// Leaked like logger().
Terminal& terminal() {
  static auto* instance = new Terminal;
  return *instance;
}

// spdlog's own sink would follow a link and wait at a named pipe.
class FileSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FileSink(std::unique_ptr<detail::AppendedFile> file) : file_(std::move(file)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::string why;
    if (!file_->append({line.data(), line.size()}, why)) {
      throw spdlog::spdlog_ex("cannot write the log's file: " + why);  // spdlog reports it
    }
  }
  void flush_() override {}

  const std::unique_ptr<detail::AppendedFile> file_;
};

void print(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

constexpr auto kClearLine = "\r\033[K";

}  // namespace

void detail::show_terminal_line(const std::string& text) {
  const std::lock_guard lock(terminal().mutex);
  terminal().last_line = printable(text);
  // Standard error, as the log: one stream keeps the order of lines.
  print("\r" + terminal().last_line + "\033[K");
}

void detail::clear_terminal_line() {
  const std::lock_guard lock(terminal().mutex);
  if (!terminal().last_line.empty()) {
    terminal().last_line.clear();
    print(kClearLine);
  }
}

void detail::append_log_to(const std::string& path) {
  std::string why;
  auto file = AppendedFile::open(path, why);
  if (file == nullptr) {
    log_warning("the log is not written to " + path + ": " + why);
    return;
  }
  auto sink = std::make_shared<FileSink>(std::move(file));
  sink->set_pattern(kPattern);
  const std::lock_guard lock(terminal().mutex);  // no line is being logged
  auto& sinks = logger().sinks();
  sinks.resize(1);  // standard error
  sinks.push_back(std::move(sink));
}

void set_log_level(LogLevel level) {
  auto chosen = to_spdlog(level);
  apply_environment_level(chosen);
  logger().set_level(chosen);
}

bool is_logged(LogLevel level) {
  return logger().should_log(to_spdlog(level));
}

void set_log_rank(int rank) {
  shown_rank = rank;
}

void log(LogLevel level, const std::string& message) {
  if (!is_logged(level)) {
    return;
  }
  const std::lock_guard lock(terminal().mutex);
  const std::string& last_line = terminal().last_line;
  if (!last_line.empty()) {
    print(kClearLine);
  }
  const int rank = shown_rank.load();
  const auto line = detail::printable(message);
  if (rank < 0) {
    logger().log(to_spdlog(level), line);
  } else {
    logger().log(to_spdlog(level), "rank {}: {}", rank, line);
  }
  if (!last_line.empty()) {
    print(last_line);
  }
}

void log_debug(const std::string& message) {
  log(LogLevel::Debug, message);
}

void log_info(const std::string& message) {
  log(LogLevel::Info, message);
}

void log_warning(const std::string& message) {
  log(LogLevel::Warning, message);
}

void log_error(const std::string& message) {
  log(LogLevel::Error, message);
}

}  // namespace ddp
