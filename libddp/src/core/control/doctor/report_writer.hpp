// SPDX-License-Identifier: Apache-2.0
// Logs and writes the reports of all ranks on a thread of its own: a file system that hangs must
// not keep rank 0 from answering the others.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "core/control/doctor/job_report.hpp"

namespace ddp::detail {

class ReportWriter {
 public:
  using Write = std::function<void(const JobReport&)>;

  /// The destructor waits for the last report for at most `limit`.
  explicit ReportWriter(Write write = publish_report,
                        std::chrono::milliseconds limit = std::chrono::seconds(2))
      : shared_(std::make_shared<Shared>(std::move(write))), limit_(limit) {}
  ~ReportWriter();
  ReportWriter(const ReportWriter&) = delete;
  ReportWriter& operator=(const ReportWriter&) = delete;

  /// Returns at once. A report that waits to be written is replaced. One thread calls it.
  void publish(JobReport report);

 private:
  // Outlives the writer if the thread hangs.
  struct Shared {
    explicit Shared(Write function) : write(std::move(function)) {}
    void run();

    const Write write;
    std::mutex mutex;  // guards all below
    std::condition_variable changed;
    std::optional<JobReport> next;
    bool stopping = false, ended = false;
  };

  const std::shared_ptr<Shared> shared_;
  const std::chrono::milliseconds limit_;
  std::thread thread_;  // from the first report on
};

}  // namespace ddp::detail
