// SPDX-License-Identifier: Apache-2.0
// Generations: what a failure belongs to, and what follows it.
#include "core/control/failure/failure_policy.hpp"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/control/failure/failure_watch.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/control/failure/job_monitor.hpp"
#include "support/catch.hpp"
#include "unit/core/plane_ranks.hpp"

namespace ddp::test {
namespace {

FailureCause cause_of(int rank, ExitCode code) {
  FailureCause cause;
  cause.rank = rank;
  cause.host = "node3";
  cause.step = 7;
  cause.message = "out of memory";
  cause.exit_code = code;
  return cause;
}

std::unique_ptr<ControlPlane> plane_of_one(int64_t generation) {
  return detail::create_control_plane({}, {.generation = generation}, nullptr, {});
}

// Exits with 0 at the end of `body`.
pid_t start_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  return child;
}

int exit_status_of(pid_t child) {
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_CASE("failure policy: the job ends with the first cause's code, a stop sooner",
          "[control_plane]") {
  for (const int rank : {0, 2}) {
    const auto end = detail::job_end_after(cause_of(1, ExitCode::Data), {.rank = rank});
    REQUIRE(end.exit_code == ExitCode::Data);
    REQUIRE(end.exit_within == 10s);
    const auto stop = detail::job_end_after(cause_of(1, ExitCode::SavedRequeue), {.rank = rank});
    REQUIRE(stop.exit_code == ExitCode::SavedRequeue);
    REQUIRE(stop.exit_within == 3s);
  }
}

TEST_CASE("failure policy: it is asked once a rank has failed", "[control_plane]") {
  const auto plane = plane_of_one(0);
  REQUIRE_FALSE(detail::job_end_of(*plane));
  plane->publish_failure(cause_of(0, ExitCode::CannotWrite));
  REQUIRE(detail::job_end_of(*plane)->exit_code == ExitCode::CannotWrite);
}

TEST_CASE("generations: each has its own first cause, which says so", "[control_plane]") {
  const auto first = plane_of_one(0), second = plane_of_one(1);
  REQUIRE(second->membership().generation == 1);
  REQUIRE(second->membership().hosts.size() == 1);
  first->publish_failure(cause_of(0, ExitCode::Data));
  REQUIRE_FALSE(second->failed());
  second->publish_failure(cause_of(0, ExitCode::PeerLost));
  REQUIRE(first->failure().generation == 0);
  REQUIRE(first->failure().to_line() == "rank 0 (node3) failed at step 7: out of memory");
  REQUIRE(second->failure().generation == 1);
  REQUIRE(second->failure().to_line() ==
          "rank 0 (node3) of generation 1 failed at step 7: out of memory");
  FailureCause of_no_rank;
  of_no_rank.message = "ranks wait for each other";
  detail::FirstFailure third(2);
  third.set(of_no_rank);
  REQUIRE(third.get().to_line() == "generation 2: ranks wait for each other");
}

TEST_CASE("generations: only the failed one is over", "[control_plane]") {
  detail::JobMonitor first(0, 1s), second(1, 1s);
  first.set_failure(cause_of(2, ExitCode::PeerLost), /*found_here=*/true);
  REQUIRE(first.is_over());
  REQUIRE_FALSE(second.is_over());
  second.set_failure(cause_of(1, ExitCode::Data), /*found_here=*/true);
  REQUIRE(second.first_cause().generation == 1);
}

TEST_CASE("generations: every rank knows the hosts, and later ranks are numbered anew",
          "[control_plane]") {
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  std::vector<Membership> known(3);
  std::vector<std::function<void()>> bodies;
  for (int rank = 0; rank < 3; ++rank) {
    bodies.push_back([&, rank] {
      const Membership membership{.generation = 4, .rank = rank, .world_size = 3};
      const auto plane = detail::create_control_plane({}, membership, rendezvous, fast_options());
      known[static_cast<std::size_t>(rank)] = plane->membership();
      plane->close();
    });
  }
  for (const auto& end : run_threads(bodies)) {
    REQUIRE(end.error.empty());
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto& membership = known[static_cast<std::size_t>(rank)];
    REQUIRE(membership.generation == 4);
    REQUIRE(membership.rank == rank);
    REQUIRE(membership.hosts == std::vector<std::string>(3, detail::host_name()));
  }
}

TEST_CASE("generations: a rank of another generation is refused", "[control_plane]") {
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  auto options = fast_options();
  options.rendezvous_timeout = 1s;
  const auto rank = [&](int number, int64_t generation) {
    return [&, number, generation] {
      detail::create_control_plane({}, {.generation = generation, .rank = number, .world_size = 2},
                                   rendezvous, options);
    };
  };
  const auto ends = run_threads({rank(0, 1), rank(1, 0)});
  REQUIRE_THAT(ends[0].error, Catch::Contains("1 of 2 ranks joined") &&
                                  Catch::Contains("generation 1: rendezvous"));
  REQUIRE_THAT(ends[1].error, Catch::Contains("or to another start or generation of the job"));
}

TEST_CASE("exit deadline: it ends the process as the policy says, unless it is destroyed",
          "[control_plane]") {
  const detail::JobEnd end{ExitCode::Data, 50ms};
  const auto late = start_child([&] {
    detail::ExitDeadline deadline;
    deadline.arm(end);
    poll(nullptr, 0, 20'000);
  });
  const auto in_time = start_child([&] {
    detail::ExitDeadline().arm(end);  // of a generation that has ended
    poll(nullptr, 0, 200);
  });
  REQUIRE(exit_status_of(late) == static_cast<int>(ExitCode::Data));
  REQUIRE(exit_status_of(in_time) == 0);
}

TEST_CASE("failure watch: it arms the deadline of its own generation", "[control_plane]") {
  // The first generation has ended by then. A stop may take 3 s.
  const auto child = [](bool second_fails) {
    return start_child([second_fails] {
      const auto first = plane_of_one(0), second = plane_of_one(1);
      const detail::FailureWatch of_second(*second);
      {
        const detail::FailureWatch of_first(*first);
        first->publish_failure(cause_of(0, ExitCode::SavedRequeue));
      }
      if (second_fails) {
        second->publish_failure(cause_of(0, ExitCode::SavedRequeue));
      }
      poll(nullptr, 0, 4000);
    });
  };
  const auto running = child(false), failing = child(true);
  REQUIRE(exit_status_of(running) == 0);
  REQUIRE(exit_status_of(failing) == static_cast<int>(ExitCode::SavedRequeue));
}

}  // namespace
}  // namespace ddp::test
