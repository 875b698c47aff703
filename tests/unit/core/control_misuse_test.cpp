// SPDX-License-Identifier: Apache-2.0
// A process that knows the job's secret and sends what libddp never sends: the limits of every
// field of every message of the control plane, in both directions.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "core/control/hub/exchange_rounds.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/wire/message_codec.hpp"
#include "support/catch.hpp"
#include "unit/core/join_by_hand.hpp"

namespace ddp::test {
namespace {

using detail::CollectiveKind;
using detail::Contribution;
using detail::ControlChannel;
using detail::encode_message;
using detail::ExchangeResult;
using detail::ExchangeValue;
using detail::FrameType;
using detail::GroupPosition;
using detail::Hello;
using detail::Progress;
using detail::RankPosition;
using detail::ResultPart;

constexpr int kLostCode = static_cast<int>(ExitCode::PeerLost);

struct Sent {
  FrameType type;
  std::string payload;
};

struct Misuse {
  std::string field;  // "message: field"
  std::vector<Sent> sent;
  std::string objection;
};

std::string text_of(std::size_t size) {
  return std::string(size, 'x');
}

FailureCause cause_with(const std::function<void(FailureCause&)>& change) {
  FailureCause cause;
  cause.rank = 1;
  cause.message = "it failed";
  change(cause);
  return cause;
}

RankPosition position_with(const std::function<void(RankPosition&)>& change) {
  RankPosition position;
  position.groups.push_back({.id = "world", .num_called = 3});
  change(position);
  return position;
}

Sent contribution(const Contribution& call) {
  return {FrameType::Contribution, encode_message(call)};
}

Sent exchange(uint64_t key, uint32_t num_ranks, std::size_t size = 1) {
  return {FrameType::Exchange, encode_message(ExchangeValue{key, num_ranks, text_of(size)})};
}

Sent failure(const std::function<void(FailureCause&)>& change) {
  return {FrameType::Failure, encode_message(cause_with(change))};
}

Sent position(const std::function<void(RankPosition&)>& change) {
  return {FrameType::Position, encode_message(position_with(change))};
}

std::vector<Sent> many(std::size_t count, const std::function<Sent(std::size_t)>& make) {
  std::vector<Sent> all;
  for (std::size_t i = 0; i < count; ++i) {
    all.push_back(make(i));
  }
  return all;
}

// What rank 1 of three sends to rank 0.
std::vector<Misuse> misuses_of_a_rank() {
  const std::string invalid = "that is not valid";
  const auto barrier = [](uint64_t sequence) {
    return contribution({sequence, CollectiveKind::Barrier, 0, "", ""});
  };
  std::vector<Misuse> all{
      {"progress: where",
       {{FrameType::Progress, encode_message(Progress{1, text_of(1025)})}},
       invalid},
      {"progress: bytes", {{FrameType::Progress, "x"}}, invalid},
      {"position: where", {position([](auto& p) { p.where = text_of(1025); })}, invalid},
      {"position: groups", {position([](auto& p) { p.groups.resize(257); })}, invalid},
      {"position: group's id",
       {position([](auto& p) { p.groups[0].id = text_of(1025); })},
       invalid},
      {"position: group's operation",
       {position([](auto& p) { p.groups[0].operation = text_of(1025); })},
       invalid},
      {"call: sequence, ahead", {barrier(1)}, "gave its call number 0 the number 1"},
      {"call: sequence, again", {barrier(0), barrier(0)}, "gave its call number 1 the number 0"},
      {"call: kind", {contribution({0, static_cast<CollectiveKind>(5), 0, "", ""})}, invalid},
      {"call: root",
       {contribution({0, CollectiveKind::Broadcast, 3, "", ""})},
       "called broadcast with root 3 in a job of 3 ranks"},
      {"call: activity", {contribution({0, CollectiveKind::Barrier, 0, text_of(65), ""})}, invalid},
      {"call: value",
       {contribution({0, CollectiveKind::AllGather, 0, "", text_of((1 << 20) + 1)})},
       invalid},
      {"calls: values in all",
       many(100,
            [](std::size_t i) {
              return contribution({i, CollectiveKind::AllGather, 0, "", text_of(1 << 20)});
            }),
       "their values exceed 67108864 bytes"},
      {"calls: number in all",
       many(400'000,
            [](std::size_t i) {
              return contribution({i, CollectiveKind::Barrier, 0, "", ""});
            }),
       "their values exceed 67108864 bytes"},
      {"exchange: num_ranks, none", {exchange(7, 0)}, "among 0 ranks in a job of 3"},
      {"exchange: num_ranks, too many", {exchange(7, 4)}, "among 4 ranks in a job of 3"},
      {"exchange: value", {exchange(7, 2, 513)}, invalid},
      {"exchange: key, again", {exchange(7, 2), exchange(7, 2)}, "gave two values to one exchange"},
      {"exchanges: number in all", many(1025, [](std::size_t i) { return exchange(i, 2); }),
       "waits for more than 1024 exchanges"},
      {"failure: rank, none", {failure([](auto& c) { c.rank = -1; })}, "of rank -1 in a job of 3"},
      {"failure: rank", {failure([](auto& c) { c.rank = 3; })}, "of rank 3 in a job of 3"},
      {"failure: exit code 0", {failure([](auto& c) { c.exit_code = ExitCode::Ok; })}, invalid},
      {"failure: exit code 256",
       {failure([](auto& c) { c.exit_code = static_cast<ExitCode>(256); })},
       invalid},
      {"failure: host", {failure([](auto& c) { c.host = text_of(256); })}, invalid},
      {"failure: where", {failure([](auto& c) { c.where = text_of(4097); })}, invalid},
      {"failure: message", {failure([](auto& c) { c.message = text_of(65537); })}, invalid}};
  for (const auto type : {FrameType::Welcome, FrameType::Result, FrameType::Exchanged}) {
    all.push_back({"a message of rank 0", {{type, ""}}, invalid});
  }
  return all;
}

// Every rank has joined then.
void wait_for_welcome(detail::JoinedHub& hub) {
  const auto is_welcome = [](const detail::Frame& frame) {
    return frame.type == FrameType::Welcome;
  };
  for (const auto start = Clock::now();
       std::none_of(hub.frames.begin(), hub.frames.end(), is_welcome) &&
       seconds_since(start) < 10;) {
    std::this_thread::sleep_for(1ms);
    hub.channel.receive(hub.frames);
  }
}

// Sends until the other side closes the connection, and reads what it says.
void send_all(ControlChannel& channel, const std::vector<Sent>& all) {
  std::vector<detail::Frame> heard;
  const auto pump = [&] {
    return channel.flush() != detail::IoStatus::Closed &&
           channel.receive(heard) != detail::IoStatus::Closed;
  };
  for (const auto& sent : all) {
    channel.queue(sent.type, sent.payload);
    while (channel.num_unsent_bytes() > (1 << 16)) {
      if (!pump()) {
        return;
      }
    }
  }
  for (const auto start = Clock::now(); seconds_since(start) < 5 && pump();) {
    std::this_thread::sleep_for(1ms);
  }
}

// Rank 1 without a control plane.
detail::JoinedHub join_as_rank_1(LocalRendezvous& rendezvous, int world_size) {
  return join_by_hand(address_of(rendezvous), launch_of(1, world_size));
}

TEST_CASE("control plane: a rank that sends what libddp never sends is named", "[control_plane]") {
  constexpr int kWorldSize = 3;
  for (const auto& misuse : misuses_of_a_rank()) {
    INFO(misuse.field);
    const auto rendezvous = std::make_shared<LocalRendezvous>();
    const auto good = [&](int rank) {
      return [&, rank] {
        const auto plane =
            detail::create_control_plane(launch_of(rank, kWorldSize), rendezvous, fast_options());
        while (!plane->failed()) {
          std::this_thread::sleep_for(1ms);
        }
        throw Error(plane->failure().exit_code, plane->failure().to_line());
      };
    };
    const auto bad = [&] {
      auto hub = join_as_rank_1(*rendezvous, kWorldSize);
      wait_for_welcome(hub);
      send_all(hub.channel, misuse.sent);
    };
    const auto start = Clock::now();
    const auto ends = run_threads({good(0), bad, good(2)});
    REQUIRE(seconds_since(start) < 15);  // the limit of a collective is 20 s
    for (const int rank : {0, 2}) {
      const auto& end = ends[static_cast<std::size_t>(rank)];
      REQUIRE(end.exit_code == kLostCode);
      REQUIRE_THAT(end.error, Catch::StartsWith("rank 1 (node9) failed") &&
                                  Catch::Contains(misuse.objection) &&
                                  Catch::EndsWith(", which libddp never does"));
    }
  }
}

// What rank 0 sends to rank 1 of three, which waits for an all_gather of sequence 0 and for an
// exchange of key 7 among two.
std::vector<Misuse> misuses_of_rank_0() {
  const auto result = [](const ResultPart& part) {
    return Sent{FrameType::Result, encode_message(part)};
  };
  const auto exchanged = [](const ExchangeResult& values) {
    return Sent{FrameType::Exchanged, encode_message(values)};
  };
  const std::string invalid = "that is not valid";
  std::vector<Misuse> all{
      {"result: sequence", {result({1, 0, 3, {"a", "b", "c"}})}, "does not expect"},
      {"result: num_values", {result({0, 0, 2, {"a", "b"}})}, "sent 2 values for call 0"},
      {"result: first", {result({0, 4, 3, {}})}, invalid},
      {"result: values", {result({0, 2, 3, {"a", "b"}})}, invalid},
      {"result: again",
       {result({0, 0, 3, {"a", "b", "c"}}), result({0, 0, 3, {"a", "b", "c"}})},
       "does not expect"},
      {"exchanged: key", {exchanged({8, {{0, "a"}, {1, "b"}}})}, "does not expect"},
      {"exchanged: values", {exchanged({7, {{0, "a"}}})}, "does not expect"},
      {"failure: rank", {failure([](auto& c) { c.rank = 3; })}, invalid},
      {"failure: exit code 0", {failure([](auto& c) { c.exit_code = ExitCode::Ok; })}, invalid}};
  for (const auto type :
       {FrameType::Progress, FrameType::Contribution, FrameType::Exchange, FrameType::Position}) {
    all.push_back({"a message of other ranks", {{type, ""}}, invalid});
  }
  return all;
}

TEST_CASE("control plane: a rank 0 that sends what libddp never sends is named",
          "[control_plane]") {
  for (const auto& misuse : misuses_of_rank_0()) {
    INFO(misuse.field);
    int fds[2] = {-1, -1};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    const auto welcome = detail::encode_message(detail::Welcome{{"node0", "node1", "node2"}});
    ControlChannel hub(detail::UniqueFd(fds[0]), detail::Side::Hub, std::string(32, 'k'), 5);
    detail::RankState state(launch_of(1, 3).membership(), fast_options());
    detail::ControlLeaf leaf(state, {ControlChannel(detail::UniqueFd(fds[1]), detail::Side::Leaf,
                                                    std::string(32, 'k'), 5),
                                     {{FrameType::Heartbeat, ""}, {FrameType::Welcome, welcome}}});
    leaf.contribute({0, CollectiveKind::AllGather, 0, "", "mine"});
    leaf.send_exchange(7, 2, "mine");
    for (const auto& sent : misuse.sent) {
      hub.queue(sent.type, sent.payload);
    }
    hub.flush();
    leaf.serve({}, Clock::now());
    REQUIRE(state.monitor.failed());
    const auto cause = state.monitor.first_cause();
    REQUIRE(cause.exit_code == ExitCode::PeerLost);
    REQUIRE_THAT(cause.to_line(),
                 Catch::StartsWith("rank 0 (node0) failed") && Catch::Contains(misuse.objection));
  }
}

TEST_CASE("control plane: a hello without a process id or with a long host is refused",
          "[control_plane]") {
  auto hello = hello_from(launch_of(1, 2), "secret");
  hello.nonce = text_of(detail::kNonceBytes);
  REQUIRE(detail::try_decode_message<Hello>(encode_message(hello)));
  detail::RankState state(launch_of(0, 2).membership(), fast_options());
  const detail::PeerTable peers(state);
  REQUIRE(peers.why_refused(hello).empty());
  hello.pid = 0;
  REQUIRE(peers.why_refused(hello) == "rank 1 (node9:0) has no process id");
  hello.host = text_of(256);
  REQUIRE_FALSE(detail::try_decode_message<Hello>(encode_message(hello)));
}

TEST_CASE("control plane: a failure that a rank publishes with code 0 ends no job with 0",
          "[control_plane]") {
  for (const int world_size : {1, 3}) {
    const auto ends = run_ranks(world_size, [](ControlPlane& plane) {
      if (plane.rank() == plane.world_size() - 1) {
        plane.publish_failure(cause_with([](auto& c) { c.exit_code = ExitCode::Ok; }));
      }
      while (!plane.failed()) {
        std::this_thread::sleep_for(1ms);
      }
      throw Error(plane.failure().exit_code, plane.failure().to_line());
    });
    for (const auto& end : ends) {
      REQUIRE(end.exit_code == 1);
      REQUIRE_THAT(end.error, Catch::Contains("it failed"));
    }
  }
}

TEST_CASE("control plane: ranks that gather to another rank may be ahead", "[control_plane]") {
  const auto ends = run_ranks(3, [](ControlPlane& plane) {
    if (plane.rank() == 0) {
      std::this_thread::sleep_for(300ms);
    }
    for (int round = 0; round < 40; ++round) {
      plane.gather(text_of(1 << 20), 0);
    }
    plane.barrier();
  });
  for (const auto& end : ends) {
    INFO(end.error);
    REQUIRE(end.error.empty());
  }
}

TEST_CASE("exchange rounds: ranks that disagree about their number are told apart",
          "[control_plane]") {
  detail::ExchangeRounds rounds({.world_size = 4});
  REQUIRE(rounds.why_invalid(1, {7, 2, "a"}).empty());
  REQUIRE_FALSE(rounds.add(1, {7, 2, "a"}));
  REQUIRE(rounds.why_invalid(2, {7, 3, "b"}) ==
          "exchanges a value among 3 ranks, another rank among 2");
  const auto result = rounds.add(3, {7, 2, "b"});
  REQUIRE(result);
  REQUIRE(result->values == std::map<int, std::string>{{1, "a"}, {3, "b"}});
  REQUIRE(rounds.why_invalid(1, {7, 2, "again"}).empty());  // the key is free
}

// Rank 1 calls `num_gathers` gathers to itself.
detail::JoinedHub join_and_gather(LocalRendezvous& rendezvous, int num_gathers) {
  auto hub = join_as_rank_1(rendezvous, 3);
  detail::Contribution call;
  call.kind = CollectiveKind::Gather;
  call.root = 1;
  for (int i = 0; i < num_gathers; ++i, ++call.sequence) {
    hub.channel.queue(FrameType::Contribution, encode_message(call));
  }
  hub.channel.flush();
  return hub;
}

TEST_CASE("control plane: messages to a rank that does not read are bounded", "[control_plane]") {
  constexpr int kNumGathers = 60;  // of 2 MiB, which is more than the limit
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  auto options = fast_options();
  options.heartbeat_misses = 1000;
  std::atomic<bool> is_over{false};
  const auto gather = [&](int rank) {
    return [&, rank] {
      const auto plane = detail::create_control_plane(launch_of(rank, 3), rendezvous, options);
      for (int i = 0; i < kNumGathers && !plane->failed(); ++i) {
        plane->gather(text_of(1 << 20), 1);
      }
      while (!plane->failed()) {
        std::this_thread::sleep_for(1ms);
      }
      is_over = true;
      throw Error(plane->failure().exit_code, plane->failure().to_line());
    };
  };
  const auto read_nothing = [&] {
    const auto hub = join_and_gather(*rendezvous, kNumGathers);
    for (const auto start = Clock::now(); !is_over && seconds_since(start) < 20;) {
      std::this_thread::sleep_for(5ms);
    }
  };
  const auto ends = run_threads({gather(0), read_nothing, gather(2)});
  for (const int rank : {0, 2}) {
    REQUIRE_THAT(ends[static_cast<std::size_t>(rank)].error,
                 Catch::StartsWith("rank 1 (node9) failed") &&
                     Catch::Contains("it does not read its messages"));
  }
}

TEST_CASE("control plane: rank 0 stays until a slow rank knows the cause", "[control_plane]") {
  constexpr int kNumGathers = 5;  // of 2 MiB, which is more than the sockets hold
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  std::atomic<bool> rank_0_gathered{false};
  std::atomic<bool> failed{false};
  const auto gather = [&](ControlPlane& plane) {
    for (int i = 0; i < kNumGathers; ++i) {
      plane.gather(text_of(1 << 20), 1);
    }
  };
  const auto end = [&] {
    const auto plane = detail::create_control_plane(launch_of(0, 3), rendezvous, fast_options());
    gather(*plane);
    rank_0_gathered = true;
    while (!plane->failed()) {
      std::this_thread::sleep_for(1ms);
    }
    failed = true;
  };
  bool knows_cause = false;
  const auto read_late = [&] {
    auto hub = join_and_gather(*rendezvous, kNumGathers);
    const int small = 1 << 16;
    setsockopt(hub.channel.fd(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    while (!failed) {
      hub.channel.flush();
      std::this_thread::sleep_for(1ms);
    }
    std::this_thread::sleep_for(100ms);
    for (bool is_open = true; is_open && !knows_cause;) {
      std::vector<detail::Frame> frames;
      is_open = hub.channel.receive(frames) != detail::IoStatus::Closed;
      knows_cause = std::any_of(frames.begin(), frames.end(), [](const detail::Frame& frame) {
        return frame.type == FrameType::Failure;
      });
    }
  };
  const auto fail = [&] {
    const auto plane = detail::create_control_plane(launch_of(2, 3), rendezvous, fast_options());
    gather(*plane);
    while (!rank_0_gathered) {
      std::this_thread::sleep_for(1ms);
    }
    plane->publish_failure(FailureCause{});
  };
  run_threads({end, read_late, fail});
  REQUIRE(knows_cause);
}

}  // namespace
}  // namespace ddp::test
