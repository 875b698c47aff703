// SPDX-License-Identifier: Apache-2.0
// Threads as ranks: a complete control plane in one process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/control/failure/failure_cause.hpp"
#include "core/launch/rendezvous.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// Rendezvous of ranks in one process, through a variable.
class LocalRendezvous final : public detail::Rendezvous {
 public:
  std::string bind_address() override { return "127.0.0.1"; }
  std::string exchange(int rank, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (rank == 0) {
      contact_ = contact;
      known_.notify_all();
    }
    if (!known_.wait_for(lock, timeout, [this] { return !contact_.empty(); })) {
      throw PeerLostError("rendezvous: missing: 0");
    }
    return contact_;
  }
  /// Returns "address port secret" once rank 0 listens.
  std::string contact() { return exchange(-1, {}, 10s); }

 private:
  std::mutex mutex_;
  std::condition_variable known_;
  std::string contact_;
};

inline ControlPlaneOptions fast_options() {
  ControlPlaneOptions options;
  options.rendezvous_timeout = 20s;
  options.heartbeat_interval = 500ms;
  options.heartbeat_misses = 20;
  options.collective_timeout = 20s;
  return options;
}

inline LaunchEnvironment launch_of(int rank, int world_size) {
  LaunchEnvironment launch;
  launch.rank = rank;
  launch.world_size = world_size;
  return launch;
}

/// Result of one rank's thread.
struct RankEnd {
  std::string error;  ///< empty if it returned
  int exit_code = 0;  ///< of the thrown ddp::Error
};

inline RankEnd end_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    return {error.what(), static_cast<int>(error.exit_code())};
  } catch (const std::exception& error) {
    return {error.what(), -1};
  }
}

/// Runs `bodies`, each in its own thread, and returns their results.
inline std::vector<RankEnd> run_threads(const std::vector<std::function<void()>>& bodies) {
  std::vector<RankEnd> ends(bodies.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    threads.emplace_back([&, i] { ends[i] = end_of(bodies[i]); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  return ends;
}

/// Each rank joins, runs `body`, and closes.
inline std::vector<RankEnd> run_ranks(int world_size,
                                      const std::function<void(ControlPlane&)>& body,
                                      const ControlPlaneOptions& options = fast_options()) {
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  std::vector<std::function<void()>> bodies;
  for (int rank = 0; rank < world_size; ++rank) {
    bodies.push_back([=, &body] {
      const auto plane =
          detail::create_control_plane(launch_of(rank, world_size), rendezvous, options);
      body(*plane);
      plane->close();
    });
  }
  return run_threads(bodies);
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace ddp::test
