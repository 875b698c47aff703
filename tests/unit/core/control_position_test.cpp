// SPDX-License-Identifier: Apache-2.0
// Who waits for whom for ever, and who is never judged; limits while a process is suspended; what
// collectives of the control plane send.
#include <atomic>
#include <future>

#include "core/control/hub/wait_monitor.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/running_clock.hpp"
#include "core/control/wire/message_codec.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/core/join_by_hand.hpp"

namespace ddp::test {
namespace {

using detail::ActivityScope;
using detail::find_deadlock;
using detail::GroupPosition;
using detail::PlaneCall;
using detail::RankPosition;
using detail::RankSnapshot;

constexpr int kMismatchCode = static_cast<int>(ExitCode::Mismatch);

GroupPosition group_at(uint64_t num_called, uint64_t pending = 0, uint64_t waited = 0,
                       const std::string& operation = "all_reduce (sum of 8 Float)") {
  return {.id = "world",
          .num_called = num_called,
          .pending = pending,
          .operation = pending == 0 ? "" : operation,
          .waited = waited};
}

RankSnapshot view_of(int64_t step, const GroupPosition& group, std::optional<PlaneCall> call = {}) {
  RankSnapshot view;
  view.host = "node";
  view.call = call;
  view.num_calls = call ? call->sequence + 1 : 7;
  view.position.emplace();
  view.position->step = step;
  view.position->plane_call = call ? call->sequence + 1 : 0;
  view.position->groups = {group};
  return view;
}

const PlaneCall kLeaving{.sequence = 7, .name = "barrier of 'close'", .leaves = true};
const PlaneCall kGathering{.sequence = 7, .name = "all_gather of 'metrics'", .leaves = false};

TEST_CASE("verdict: a rank left while another waits for it", "[control_plane]") {
  REQUIRE(find_deadlock({view_of(4, group_at(12, 12)), view_of(3, group_at(11), kLeaving)}) ==
          "rank 1 (node) left at step 3 after 11 collectives, while rank 0 (node) waits at step 4 "
          "in all_reduce #12 (sum of 8 Float). All ranks make the same calls in the same order; "
          "where only some ranks change requires_grad, change it on all; where they have different "
          "numbers of batches, use ddp::join or a DistributedSampler");
  // It called the collective before it left: the other one may still end it.
  REQUIRE(
      find_deadlock({view_of(4, group_at(12, 12)), view_of(3, group_at(12), kLeaving)}).empty());
  // What it told is older than its call, so it may have called more since.
  auto old = view_of(3, group_at(11), kLeaving);
  old.position->plane_call = 0;
  REQUIRE(find_deadlock({view_of(4, group_at(12, 12)), old}).empty());
  // It is in another group.
  auto other = view_of(3, group_at(11), kLeaving);
  other.position->groups[0].id = "world/2:0";
  REQUIRE(find_deadlock({view_of(4, group_at(12, 12)), other}).empty());
}

TEST_CASE("verdict: one waits in a collective, another on the control plane", "[control_plane]") {
  const auto gathers = view_of(3, group_at(11), kGathering);
  REQUIRE_THAT(find_deadlock({gathers, view_of(4, group_at(12, 12, 12))}),
               Catch::StartsWith("ranks diverged: rank 0 (node) waits at step 3 in the "
                                 "control plane's all_gather of 'metrics' after 11 collectives, "
                                 "while rank 1 (node) waits at step 4 in all_reduce #12 (sum of"));
  // It goes on beside its collective, and will call the control plane.
  REQUIRE(find_deadlock({gathers, view_of(4, group_at(12, 12, 0))}).empty());
  // It is in the same call of the control plane.
  REQUIRE(find_deadlock({gathers, view_of(4, group_at(12, 12, 12), kGathering)}).empty());
  // It called that one before, and did not have to wait for it.
  auto earlier = view_of(4, group_at(12, 12, 12));
  earlier.num_calls = 8;
  REQUIRE(find_deadlock({gathers, earlier}).empty());
  // Another thread of either may make the call that the other waits for.
  auto threads = view_of(4, group_at(12, 12, 12));
  threads.position->one_thread = false;
  REQUIRE(find_deadlock({gathers, threads}).empty());
  threads = gathers;
  threads.position->one_thread = false;
  REQUIRE(find_deadlock({threads, view_of(4, group_at(12, 12, 12))}).empty());
}

// A thread that has called nothing yet may make the call that the other rank waits for.
TEST_CASE("verdict: a thread's first call may still come", "[control_plane]") {
  const auto waits = view_of(4, group_at(12, 12, 12));
  auto barrier = view_of(3, group_at(11), kGathering);
  REQUIRE_FALSE(find_deadlock({barrier, waits}).empty());
  barrier.call->name = "barrier";
  barrier.call->is_own_barrier = true;  // the main thread often waits in it for others
  REQUIRE(find_deadlock({barrier, waits}).empty());
  // No thread of that rank has used this communicator yet.
  REQUIRE(
      find_deadlock({view_of(3, group_at(0), kGathering), view_of(4, group_at(1, 1, 1))}).empty());
  // A rank that ends calls nothing more, whichever thread called before.
  REQUIRE_FALSE(
      find_deadlock({view_of(3, group_at(0), kLeaving), view_of(4, group_at(1, 1, 1))}).empty());
}

TEST_CASE("verdict: different operations with one number", "[control_plane]") {
  REQUIRE_THAT(find_deadlock({view_of(4, group_at(12, 12)),
                              view_of(4, group_at(12, 12, 12, "barrier (no tensor)"))}),
               Catch::Contains("rank 0 (node) waits at step 4 in all_reduce #12") &&
                   Catch::Contains("rank 1 (node) waits at step 4 in barrier #12"));
  REQUIRE(find_deadlock({view_of(4, group_at(12, 12)), view_of(4, group_at(12, 12, 12))}).empty());
  REQUIRE(find_deadlock({view_of(4, group_at(12, 12)),
                         view_of(4, group_at(13, 13, 13, "barrier (no tensor)"))})
              .empty());
}

TEST_CASE("verdict: calls that are being compared", "[control_plane]") {
  const auto checks = [](const std::string& operation = "all_reduce (sum of 8 Float)") {
    auto view = view_of(4, group_at(12, 12, 12, operation));
    view.position->groups[0].is_check = true;
    return view;
  };
  REQUIRE_THAT(
      find_deadlock({checks(), view_of(3, group_at(11), kLeaving)}),
      Catch::StartsWith("rank 1 (node) left at step 3 after 11 collectives, while rank 0 (node) "
                        "waits at step 4 in the check of all_reduce #12 (sum of 8 Float)."));
  REQUIRE_THAT(find_deadlock({checks("barrier"), view_of(3, group_at(11), kGathering)}),
               Catch::Contains("rank 0 (node) waits at step 4 in the check of barrier #12."));
  // Every rank throws once the slowest one has called.
  REQUIRE(find_deadlock({checks(), checks("barrier")}).empty());
}

TEST_CASE("verdict: a rank that waits for nobody is never judged", "[control_plane]") {
  RankSnapshot busy;  // it tells no position
  busy.host = "node";
  REQUIRE(find_deadlock({view_of(4, group_at(12, 12, 12)), busy}).empty());
  REQUIRE(find_deadlock({view_of(4, group_at(12), kLeaving), busy}).empty());
  REQUIRE(find_deadlock({view_of(4, group_at(12), kGathering), busy}).empty());
}

TEST_CASE("position: it travels whole, and any bytes are refused or read",
          "[control_plane][locale]") {
  auto position = *view_of(-1, group_at(12, 11, 12), kGathering).position;
  position.where = "forward";
  position.one_thread = false;
  position.groups[0].is_check = true;
  const auto bytes = encode_position(position);
  REQUIRE(detail::try_decode_message<RankPosition>(bytes) == position);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    REQUIRE_FALSE(detail::try_decode_message<RankPosition>(bytes.substr(0, size)));
  }
  REQUIRE_FALSE(detail::try_decode_message<RankPosition>(bytes + "x"));
}

// A communicator's word, as a rank of the test wants it.
struct FakeGroup {
  explicit FakeGroup(ControlPlane& plane) {
    plane.position_board()->add_probe([state = state] {
      const std::lock_guard lock(state->mutex);
      return state->position;
    });
  }
  void set(const GroupPosition& position) const {
    const std::lock_guard lock(state->mutex);
    state->position = position;
    state->position.caller = std::this_thread::get_id();
  }
  struct State {
    std::mutex mutex;
    GroupPosition position;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
};

// Until the job ends or `limit` passed.
void wait_in_collective(ControlPlane& plane, Clock::duration limit = 10s) {
  for (const auto start = Clock::now(); !plane.failed() && Clock::now() - start < limit;) {
    std::this_thread::sleep_for(5ms);
  }
  if (plane.failed()) {
    throw Error(plane.failure().exit_code, plane.failure().to_line());
  }
}

TEST_CASE("control plane: all end where one closed and another waits for it", "[control_plane]") {
  for (const int leaver : {0, 2}) {
    const auto start = Clock::now();
    const auto ends = run_ranks(3, [&](ControlPlane& plane) {
      const FakeGroup group(plane);
      plane.set_progress(3, "");
      if (plane.rank() == leaver) {
        group.set(group_at(11));
        return;  // closes
      }
      plane.set_progress(4, "backward");
      group.set(group_at(12, 12, 12));
      wait_in_collective(plane);
    });
    REQUIRE(seconds_since(start) < 5);
    for (const auto& end : ends) {
      REQUIRE(end.exit_code == kMismatchCode);
      REQUIRE_THAT(end.error, Catch::Contains("rank " + std::to_string(leaver) + " (") &&
                                  Catch::Contains(") left at step 3") &&
                                  Catch::Contains("waits at step 4 in backward in all_reduce #12"));
    }
  }
}

TEST_CASE("control plane: a rank that is busy is waited for", "[control_plane]") {
  auto options = fast_options();
  options.heartbeat_interval = 50ms;  // positions are looked at every 20 ms
  options.heartbeat_misses = 200;
  std::vector<RankEnd> ends;
  const auto body = [](ControlPlane& plane) {
    const FakeGroup group(plane);
    plane.set_progress(3, plane.rank() == 0 ? "evaluation" : "backward");
    if (plane.rank() == 0) {  // evaluates alone
      group.set(group_at(11));
      std::this_thread::sleep_for(600ms);
    } else if (plane.rank() == 1) {
      group.set(group_at(12, 12, 12));
      std::this_thread::sleep_for(700ms);
    }
    group.set(group_at(12));
    plane.barrier();
  };
  const auto told = ::testing::stderr_of([&] { ends = run_ranks(3, body, options); });
  for (const auto& end : ends) {
    REQUIRE(end.error.empty());
  }
  REQUIRE_THAT(told, Catch::Contains(" and 1 more wait for 300 ms or longer; meanwhile rank 0 (") &&
                         Catch::Contains(") is at step 3 in evaluation"));
}

TEST_CASE(
    "control plane: a thread's first collective is waited for while the main thread is in "
    "barrier()",
    "[control_plane]") {
  auto options = fast_options();
  options.heartbeat_interval = 200ms;  // positions are looked at every 20 ms
  const auto ends = run_ranks(
      2,
      [](ControlPlane& plane) {
        const FakeGroup group(plane);
        group.set(group_at(11));
        if (plane.rank() == 1) {
          group.set(group_at(12, 12, 12));
          wait_in_collective(plane, 600ms);
          group.set(group_at(12));
        }
        std::thread first([&] {  // of rank 0: its first call ends the wait of rank 1
          std::this_thread::sleep_for(500ms);
          if (plane.rank() == 0) {
            group.set(group_at(12));
          }
        });
        const auto end = end_of([&] { plane.barrier(); });
        first.join();
        if (!end.error.empty()) {
          throw std::runtime_error(end.error);
        }
      },
      options);
  for (const auto& end : ends) {
    REQUIRE(end.error.empty());
  }
}

TEST_CASE("control plane: a rank that waits for less than the limit is not reported",
          "[control_plane]") {
  auto options = fast_options();
  options.heartbeat_interval = 100ms;  // a wait is reported after 600 ms
  options.heartbeat_misses = 100;
  const auto body = [](ControlPlane& plane) {
    const FakeGroup group(plane);
    plane.set_progress(3, plane.rank() == 0 ? "evaluation" : "backward");
    // Rank 2 has hardly begun to wait when rank 1 reaches the limit.
    std::this_thread::sleep_for(plane.rank() == 2 ? 550ms : 0ms);
    group.set(plane.rank() == 0 ? group_at(11) : group_at(12, 12, 12));
    std::this_thread::sleep_for(plane.rank() == 2 ? 450ms : 1000ms);
    group.set(group_at(12));
    plane.barrier();
  };
  const auto told = ::testing::stderr_of([&] {
    for (const auto& end : run_ranks(3, body, options)) {
      REQUIRE(end.error.empty());
    }
  });
  REQUIRE_THAT(told, Catch::Contains("rank 1 (") &&
                         Catch::Contains(") waits for 600 ms or longer; meanwhile rank 0 ("));
  REQUIRE_THAT(told, !Catch::Contains(" more wait"));
}

TEST_CASE("control plane: calls of different activities are told apart", "[control_plane]") {
  const auto ends = run_ranks(3, [](ControlPlane& plane) {
    plane.set_progress(5, "");
    plane.barrier();
    const ActivityScope activity(plane, plane.rank() == 0 ? "metrics" : "stop check");
    plane.all_gather("1 2");
  });
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == kMismatchCode);
    REQUIRE_THAT(end.error, Catch::Contains("all_gather of 'metrics'") &&
                                Catch::Contains("all_gather of 'stop check'"));
  }
}

TEST_CASE("control plane: a rank that closes while another calls it is named as the one that left",
          "[control_plane]") {
  const auto ends = run_ranks(2, [](ControlPlane& plane) {
    plane.set_progress(plane.rank() == 1 ? 3 : 4, "");
    if (plane.rank() == 0) {
      std::this_thread::sleep_for(100ms);
      plane.all_gather("x");
    }
  });
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == kMismatchCode);
    REQUIRE_THAT(end.error, Catch::StartsWith("rank 1 (") && Catch::Contains(") left at step 3") &&
                                Catch::Contains("called the control plane's all_gather at step 4"));
  }
}

TEST_CASE("control plane: gather gives the root alone all values", "[control_plane]") {
  for (const int root : {0, 2}) {
    std::vector<std::vector<std::string>> gathered(4);
    std::atomic<int> num_refused{0};
    const auto ends = run_ranks(4, [&](ControlPlane& plane) {
      const auto at = static_cast<std::size_t>(plane.rank());
      for (int round = 0; round < 10; ++round) {
        gathered[at] = plane.gather(std::string(1 << 20, static_cast<char>('a' + at)), root);
      }
      const auto refused = end_of([&] { plane.gather("", 4); });
      num_refused += refused.exit_code == static_cast<int>(ExitCode::Settings) ? 1 : 0;
    });
    for (std::size_t at = 0; at < gathered.size(); ++at) {
      INFO(ends[at].error);
      REQUIRE(ends[at].error.empty());
      REQUIRE(gathered[at].size() == (static_cast<int>(at) == root ? 4 : 0));
    }
    REQUIRE(gathered[static_cast<std::size_t>(root)][3] == std::string(1 << 20, 'd'));
    REQUIRE(num_refused == 4);
  }
}

// Counts what rank 0 sends to the last rank, which is driven by hand, in one all_gather.
TEST_CASE("control plane: an all_gather is one message a rank", "[control_plane]") {
  constexpr int kWorldSize = 4;
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  int num_results = 0;
  const auto by_hand = [&] {
    auto hub = join_by_hand(address_of(*rendezvous), launch_of(kWorldSize - 1, kWorldSize));
    hub.channel.queue(detail::FrameType::Contribution,
                      detail::encode_message(detail::Contribution{
                          0, detail::CollectiveKind::AllGather, 0, {}, std::string(100, 'x')}));
    hub.channel.flush();
    for (const auto start = Clock::now(); Clock::now() - start < 500ms;) {
      for (const auto& frame : std::exchange(hub.frames, {})) {
        num_results += frame.type == detail::FrameType::Result ? 1 : 0;
      }
      hub.channel.receive(hub.frames);
      std::this_thread::sleep_for(5ms);
    }
  };
  std::vector<std::function<void()>> bodies{by_hand};
  for (int rank = 0; rank < kWorldSize - 1; ++rank) {
    bodies.push_back([&, rank] {
      const auto plane =
          detail::create_control_plane(launch_of(rank, kWorldSize), rendezvous, fast_options());
      plane->all_gather(std::string(100, 'x'));
      wait_in_collective(*plane);  // the one by hand leaves without a word
    });
  }
  run_threads(bodies);
  REQUIRE(num_results == 1);
}

TEST_CASE("control plane: progress does not wait for who serves the sockets", "[control_plane]") {
  double longest = 0;
  std::promise<void> busy;
  const auto ends = run_ranks(2, [&](ControlPlane& plane) {
    if (plane.rank() == 1) {
      bool first = true;
      plane.position_board()->add_probe([&busy, first]() mutable {
        if (std::exchange(first, false)) {
          busy.set_value();
          std::this_thread::sleep_for(2s);  // the thread that serves stands here
        }
        return GroupPosition{.is_closed = true};
      });
      busy.get_future().wait();
      for (int64_t step = 0; step < 100; ++step) {
        const auto start = Clock::now();
        plane.set_progress(step, "forward");
        longest = std::max(longest, seconds_since(start));
      }
    }
    plane.barrier();
  });
  REQUIRE(ends[1].error.empty());
  REQUIRE(longest < 1);  // a preemption takes less, the thread that serves more
}

TEST_CASE("revocable probe: its object may go at any time", "[control_plane]") {
  auto object = std::make_unique<std::atomic<uint64_t>>(1);
  std::promise<void> reads;
  std::atomic<bool> is_read = false;
  detail::PositionSource source([&, raw = object.get()] {
    if (!is_read) {  // close() reads once more
      reads.set_value();
    }
    std::this_thread::sleep_for(50ms);
    const auto number = raw->load();
    is_read = true;
    return group_at(number);
  });
  auto position = std::async(std::launch::async, [&] { return source.read(); });
  reads.get_future().wait();
  source.close();
  REQUIRE(is_read);
  object.reset();
  REQUIRE(position.get() == group_at(1));
  // The count is final.
  REQUIRE(source.read() == GroupPosition{.id = "world", .num_called = 1, .is_closed = true});
}

TEST_CASE("running clock: a suspension does not count", "[control_plane]") {
  const detail::RunningClock::TimePoint start{1h};
  detail::RunningClock clock(100ms, start);
  clock.tick(start + 60ms);
  REQUIRE(clock.at(start + 90ms) == start + 90ms);
  // Suspended for a minute: also who asks before the loop turns sees at most a turn.
  REQUIRE(clock.at(start + 1min) == start + 160ms);
  clock.tick(start + 1min);
  REQUIRE(clock.at(start + 1min) == start + 160ms);
  REQUIRE(clock.at(start + 1min + 30ms) == start + 190ms);
  // It is remembered for a while.
  REQUIRE(clock.recent_loss(1s) == 1min - 160ms);
  clock.tick(start + 1min + 90ms);
  REQUIRE(clock.recent_loss(1s) == 1min - 160ms);
  REQUIRE(clock.recent_loss(80ms) == 0ms);
}

TEST_CASE("running limit: a suspension does not count", "[control_plane]") {
  const detail::RunningClock::TimePoint start{1h};
  detail::RunningLimit limit(3s, start);
  REQUIRE_FALSE(limit.is_over(start + 900ms));
  REQUIRE_FALSE(limit.is_over(start + 1min));  // suspended: counts as a second
  REQUIRE_FALSE(limit.is_over(start + 1min + 900ms));
  REQUIRE(limit.is_over(start + 1min + 1100ms));
}

}  // namespace
}  // namespace ddp::test
