// SPDX-License-Identifier: Apache-2.0
// A control plane whose ranks are threads of one process, for tests of agreement between ranks.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/control_plane.hpp"

namespace testing {

class ThreadJob {
 public:
  explicit ThreadJob(int world_size) : values_(world_size), world_size_(world_size) {}

  std::vector<std::string> all_gather(int rank, const std::string& value) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !leaving_; });
    values_[rank] = value;
    if (++arrived_ == world_size_) {
      leaving_ = true;
      ++num_gathers;
      changed_.notify_all();
    }
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [this] { return leaving_; })) {
      throw ddp::PeerLostError("a rank of the test did not come");
    }
    const auto result = values_;
    if (--arrived_ == 0) {
      leaving_ = false;
      changed_.notify_all();
    }
    return result;
  }
  int world_size() const { return world_size_; }
  int num_gathers = 0;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> values_;
  const int world_size_;
  int arrived_ = 0;
  bool leaving_ = false;
};

class ThreadControlPlane final : public ddp::ControlPlane {
 public:
  ThreadControlPlane(ThreadJob& job, int rank)
      : job_(job), membership_{.rank = rank, .world_size = job.world_size()} {}
  const ddp::Membership& membership() const override { return membership_; }
  std::string broadcast(const std::string& value, int root) override {
    return job_.all_gather(rank(), value)[root];
  }
  std::vector<std::string> all_gather(const std::string& value) override {
    return job_.all_gather(rank(), value);
  }
  void barrier() override { job_.all_gather(rank(), ""); }
  void set_progress(int64_t, const std::string&) override {}
  void publish_failure(const ddp::FailureCause&) override {}
  bool failed() const override { return false; }
  ddp::FailureCause failure() const override { return {}; }
  int add_failure_callback(std::function<void(const ddp::FailureCause&)>) override { return 0; }
  void remove_failure_callback(int) override {}
  void close() override {}

 private:
  ThreadJob& job_;
  const ddp::Membership membership_;
};

/// Runs `body` as every rank; returns each rank's exception (nullptr if none).
inline std::vector<std::exception_ptr> run_ranks(
    int world_size, const std::function<void(ddp::ControlPlane&)>& body) {
  ThreadJob job(world_size);
  std::vector<std::exception_ptr> errors(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ThreadControlPlane plane(job, rank);
        body(plane);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  return errors;
}

/// Throws the error of the first rank that has one.
inline void rethrow(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace testing
