// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/report_writer.hpp"

#include <exception>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

ReportWriter::~ReportWriter() {
  if (!thread_.joinable()) {
    return;
  }
  std::unique_lock lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
  const bool ended = shared_->changed.wait_for(lock, limit_, [this] { return shared_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void ReportWriter::publish(JobReport report) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->next = std::move(report);
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([shared = shared_] { shared->run(); });
  }
  shared_->changed.notify_all();
}

void ReportWriter::Shared::run() {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [this] { return next || stopping; });
    if (!next) {
      break;
    }
    const auto report = *std::exchange(next, {});
    lock.unlock();
    try {
      write(report);
    } catch (const std::exception& error) {
      log_warning(concat("the report of all ranks is lost: ", error.what()));
    }
    lock.lock();
  }
  ended = true;
  changed.notify_all();
}

}  // namespace ddp::detail
