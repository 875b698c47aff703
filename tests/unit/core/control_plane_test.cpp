// SPDX-License-Identifier: Apache-2.0
// The control plane with threads as ranks: collectives, failures, agreement on the first cause.
#include "ddp/core/control_plane.hpp"

#include <atomic>
#include <filesystem>
#include <iterator>

#include "core/control/plane_interfaces.hpp"
#include "support/catch.hpp"
#include "unit/core/plane_ranks.hpp"

namespace ddp::test {
namespace {

void require_all_ok(const std::vector<RankEnd>& ends) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    INFO("rank " << rank << ": " << ends[rank].error);
    REQUIRE(ends[rank].error.empty());
  }
}

std::size_t count_entries(const char* folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                                std::filesystem::directory_iterator()));
}

TEST_CASE("control plane: collectives carry every rank's value", "[control_plane][locale]") {
  for (const int world_size : {1, 2, 5}) {
    std::vector<std::vector<std::string>> gathered(static_cast<std::size_t>(world_size));
    std::vector<std::string> from_last(gathered.size());
    std::vector<int> agreed(gathered.size());
    const auto ends = run_ranks(world_size, [&](ControlPlane& plane) {
      const auto at = static_cast<std::size_t>(plane.rank());
      for (int round = 0; round < 20; ++round) {
        gathered[at] = plane.all_gather(std::to_string(plane.rank() * 10));
        from_last[at] = plane.broadcast("from " + std::to_string(plane.rank()), world_size - 1);
        plane.barrier();
      }
      agreed[at] = (plane.agree_any(plane.rank() == world_size - 1) ? 1 : 0) +
                   (plane.agree_any(false) ? 10 : 0);
      plane.require_equal("bucket cap", "25");
    });
    require_all_ok(ends);
    for (std::size_t at = 0; at < gathered.size(); ++at) {
      REQUIRE(gathered[at].size() == gathered.size());
      for (std::size_t rank = 0; rank < gathered.size(); ++rank) {
        REQUIRE(gathered[at][rank] == std::to_string(rank * 10));
      }
      REQUIRE(from_last[at] == "from " + std::to_string(world_size - 1));
      REQUIRE(agreed[at] == 1);
    }
  }
}

TEST_CASE("control plane: some ranks exchange values, in an order of their own",
          "[control_plane][locale]") {
  std::vector<std::map<int, std::string>> all(4), odd(4);
  const auto ends = run_ranks(4, [&](ControlPlane& plane) {
    auto& exchange = *plane.group_exchange();
    const auto at = static_cast<std::size_t>(plane.rank());
    const auto mine = "of " + std::to_string(plane.rank());
    const auto exchange_odd = [&] { odd[at] = exchange.exchange(7, 2, mine, [] {}); };
    // Rank 1 waits in both concurrently, rank 3 calls them one after the other.
    std::thread beside([&] {
      if (plane.rank() == 1) {
        exchange_odd();
      }
    });
    all[at] = exchange.exchange(8, 4, std::string(1000, 'x'), [] {});
    if (plane.rank() == 3) {
      exchange_odd();
    }
    beside.join();
    plane.barrier();
  });
  require_all_ok(ends);
  for (std::size_t at = 0; at < 4; ++at) {
    REQUIRE(all[at].size() == 4);
    REQUIRE(all[at].at(2) == std::string(detail::GroupExchange::kMaxExchangeBytes, 'x'));
    REQUIRE(odd[at].size() == (at % 2 == 1 ? 2 : 0));
  }
  REQUIRE(odd[1].at(3) == "of 3");
  REQUIRE(odd[3].at(1) == "of 1");
}

TEST_CASE("control plane: an exchange ends with the job's failure, and where its caller says so",
          "[control_plane]") {
  std::string told, stopped;
  const auto ends = run_ranks(2, [&](ControlPlane& plane) {
    auto& exchange = *plane.group_exchange();
    if (plane.rank() == 1) {
      try {
        exchange.exchange(1, 2, "", [] { throw std::runtime_error("enough"); });
      } catch (const std::runtime_error& error) {
        stopped = error.what();
      }
      FailureCause cause;
      cause.message = "the disk is full";
      plane.publish_failure(cause);
      return;
    }
    try {
      exchange.exchange(2, 2, "", [] {});
    } catch (const PeerLostError& error) {
      told = error.what();
    }
  });
  REQUIRE(stopped == "enough");
  REQUIRE_THAT(told, Catch::Contains("the disk is full"));
}

TEST_CASE("control plane: values up to 1 MiB a rank, larger ones are refused", "[control_plane]") {
  std::atomic<int> whole{0};
  const std::size_t limit = 1 << 20;
  const auto ends = run_ranks(3, [&](ControlPlane& plane) {
    const char letter = static_cast<char>('a' + plane.rank());
    const auto values = plane.all_gather(std::string(limit, letter));
    whole += values[0] == std::string(limit, 'a') && values[2] == std::string(limit, 'c');
    const auto end = end_of([&] { plane.all_gather(std::string(limit + 1, letter)); });
    whole += end.exit_code == static_cast<int>(ExitCode::Settings) ? 10 : 0;
  });
  require_all_ok(ends);
  REQUIRE(whole == 33);
}

TEST_CASE("control plane: a barrier holds until the last rank is there", "[control_plane]") {
  std::atomic<int> arrived{0};
  std::atomic<int> early{0};
  require_all_ok(run_ranks(4, [&](ControlPlane& plane) {
    std::this_thread::sleep_for(plane.rank() * 30ms);
    ++arrived;
    plane.barrier();
    early += arrived == 4 ? 0 : 1;
  }));
  REQUIRE(early == 0);
}

TEST_CASE("control plane: unequal values are named on all ranks", "[control_plane][locale]") {
  const auto ends = run_ranks(3, [&](ControlPlane& plane) {
    plane.require_equal("ddp.bucket_cap_mb", plane.rank() == 2 ? "50" : "25");
  });
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == static_cast<int>(ExitCode::Mismatch));
    REQUIRE(end.error == "ddp.bucket_cap_mb differs between ranks: '25' on rank 0, '50' on rank 2");
  }
}

TEST_CASE("control plane: ranks that call different collectives fail together", "[control_plane]") {
  const auto ends = run_ranks(3, [&](ControlPlane& plane) {
    if (plane.rank() == 1) {
      plane.all_gather("x");
    } else {
      plane.barrier();
    }
  });
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == static_cast<int>(ExitCode::Mismatch));
    REQUIRE_THAT(end.error, Catch::Contains("all_gather") && Catch::Contains("barrier"));
  }
}

TEST_CASE("control plane: a failure reaches every rank before it unwinds", "[control_plane]") {
  std::atomic<int> callbacks{0};
  std::atomic<int64_t> slowest_ms{0};
  const int world_size = 4;
  std::atomic<Clock::time_point::rep> failed_at{0};
  const auto ends = run_ranks(world_size, [&](ControlPlane& plane) {
    plane.add_failure_callback([&](const FailureCause& cause) {
      callbacks += cause.rank == 2 ? 1 : 100;
      const Clock::time_point start{Clock::duration(failed_at.load())};
      const int64_t ms = static_cast<int64_t>(seconds_since(start) * 1000);
      for (int64_t seen = slowest_ms; ms > seen && !slowest_ms.compare_exchange_weak(seen, ms);) {
      }
    });
    plane.set_progress(41, "bucket 3");
    plane.barrier();
    if (plane.rank() == 2) {
      FailureCause cause;
      cause.message = "out of memory";
      cause.exit_code = ExitCode::Data;
      failed_at = Clock::now().time_since_epoch().count();
      plane.publish_failure(cause);
      throw std::runtime_error("out of memory");
    }
    plane.barrier();  // never completes
  });
  for (int rank = 0; rank < world_size; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    if (rank == 2) {
      REQUIRE(end.error == "out of memory");
    } else {
      REQUIRE(end.exit_code == static_cast<int>(ExitCode::Data));
      REQUIRE_THAT(end.error, Catch::Contains("rank 2 (") &&
                                  Catch::Contains("failed at step 41 in bucket 3: out of memory"));
    }
  }
  REQUIRE(callbacks == world_size);
  REQUIRE(slowest_ms < 500);
}

TEST_CASE("control plane: the callback that was added last runs first", "[control_plane]") {
  std::vector<std::string> order;
  run_ranks(1, [&](ControlPlane& plane) {
    plane.add_failure_callback([&](const FailureCause&) { order.push_back("communicator"); });
    plane.add_failure_callback([&](const FailureCause&) { order.push_back("deadline"); });
    plane.publish_failure({});
  });
  REQUIRE(order == std::vector<std::string>{"deadline", "communicator"});
}

TEST_CASE("control plane: only the first of several causes counts", "[control_plane]") {
  const auto ends = run_ranks(4, [&](ControlPlane& plane) {
    plane.barrier();
    FailureCause cause;
    cause.message = "rank " + std::to_string(plane.rank()) + " says so";
    plane.publish_failure(cause);
    throw std::runtime_error(plane.failure().to_line());
  });
  for (const auto& end : ends) {
    REQUIRE(end.error == ends[0].error);
  }
}

TEST_CASE("control plane: a callback that came too late runs at once, a removed one never",
          "[control_plane]") {
  std::atomic<int> removed{0};
  std::atomic<int> late{0};
  run_ranks(2, [&](ControlPlane& plane) {
    const int token = plane.add_failure_callback([&](const FailureCause&) { ++removed; });
    plane.remove_failure_callback(token);
    std::mutex mutex;
    std::condition_variable heard;
    bool known = false;
    plane.add_failure_callback([&](const FailureCause&) {
      const std::lock_guard lock(mutex);
      known = true;
      heard.notify_all();
    });
    plane.barrier();
    if (plane.rank() == 0) {
      plane.publish_failure({});
    }
    std::unique_lock lock(mutex);
    heard.wait(lock, [&] { return known; });
    lock.unlock();
    plane.add_failure_callback([&](const FailureCause&) { ++late; });
  });
  REQUIRE(removed == 0);
  REQUIRE(late == 2);
}

TEST_CASE("control plane: a rank that leaves without closing is a failure", "[control_plane]") {
  for (const int leaver : {0, 1}) {
    const auto ends = run_ranks(3, [&](ControlPlane& plane) {
      plane.set_progress(7, "forward");
      plane.barrier();
      if (plane.rank() == leaver) {
        throw std::runtime_error("unwinds");
      }
      plane.barrier();
    });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != leaver) {
        const auto& end = ends[static_cast<std::size_t>(rank)];
        REQUIRE(end.exit_code == static_cast<int>(ExitCode::PeerLost));
        REQUIRE_THAT(end.error, Catch::Contains("rank " + std::to_string(leaver) + " (") &&
                                    Catch::Contains("at step 7 in forward"));
      }
    }
  }
}

TEST_CASE("control plane: a collective that waits too long names who is missing",
          "[control_plane]") {
  auto options = fast_options();
  options.collective_timeout = 200ms;
  for (const int missing : {0, 2}) {
    const auto ends = run_ranks(
        3,
        [&](ControlPlane& plane) {
          if (plane.rank() == missing) {
            for (int i = 0; i < 200 && !plane.failed(); ++i) {
              std::this_thread::sleep_for(10ms);
            }
          }
          plane.barrier();
        },
        options);
    for (const auto& end : ends) {
      REQUIRE(end.exit_code == static_cast<int>(ExitCode::PeerLost));
      REQUIRE_THAT(end.error, Catch::Contains("waited 200 ms for rank " + std::to_string(missing)));
    }
  }
}

TEST_CASE("control plane: the first-cause line", "[control_plane][locale]") {
  FailureCause cause;
  cause.rank = 2;
  cause.host = "node3";
  cause.step = 41;
  cause.where = "bucket 3";
  cause.message = "out of memory";
  REQUIRE(cause.to_line() == "rank 2 (node3) failed at step 41 in bucket 3: out of memory");
  cause.step = -1;
  cause.where.clear();
  REQUIRE(cause.to_line() == "rank 2 (node3) failed before the first step: out of memory");
}

TEST_CASE("control plane: starting and ending leaks nothing", "[control_plane]") {
  run_ranks(3, [](ControlPlane& plane) { plane.barrier(); });
  const auto files = count_entries("/proc/self/fd");
  for (int i = 0; i < 50; ++i) {
    const bool fails = i % 5 == 4;
    run_ranks(3, [fails](ControlPlane& plane) {
      plane.barrier();
      if (fails && plane.rank() == 1) {
        throw std::runtime_error("on purpose");
      }
    });
  }
  REQUIRE(count_entries("/proc/self/fd") == files);
  REQUIRE(count_entries("/proc/self/task") <= 2);  // TSan has its own thread
}

}  // namespace
}  // namespace ddp::test
