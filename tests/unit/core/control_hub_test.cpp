// SPDX-License-Identifier: Apache-2.0
// The parts of rank 0's control plane, each alone: rounds of collectives, waiting ranks, the table
// of peers and the acceptor of connections.
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "core/control/hub/collective_rounds.hpp"
#include "core/control/hub/peer_acceptor.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/control/hub/wait_monitor.hpp"
#include "core/control/wire/message_codec.hpp"
#include "support/catch.hpp"
#include "unit/core/plane_ranks.hpp"

namespace ddp::test {
namespace {

using detail::CollectiveKind;
using detail::CollectiveRounds;
using detail::ControlChannel;
using detail::Frame;
using detail::FrameType;
using detail::Hello;
using detail::IoStatus;
using detail::PeerAcceptor;
using detail::PeerTable;
using detail::RankState;
using detail::Side;
using detail::UniqueFd;
using detail::WaitMonitor;

const std::string kChannelKey(32, 'k');

struct ChannelPair {
  ControlChannel hub, leaf;
};

ChannelPair make_channels() {
  int fds[2] = {-1, -1};
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  return {ControlChannel(UniqueFd(fds[0]), Side::Hub, kChannelKey, 5),
          ControlChannel(UniqueFd(fds[1]), Side::Leaf, kChannelKey, 5)};
}

Hello hello_of(uint32_t rank, uint32_t world_size = 3) {
  Hello hello;
  hello.generation = 5;
  hello.rank = rank;
  hello.world_size = world_size;
  hello.pid = 100 + rank;
  hello.host = "node" + std::to_string(rank);
  return hello;
}

// Rank 0 of a job of three. The other ends of the connections are in `leaves`.
struct Table {
  Table() {
    for (const uint32_t rank : {1, 2}) {
      auto pair = make_channels();
      peers.add(hello_of(rank), std::move(pair.hub), joined_at);
      leaves.push_back(std::move(pair.leaf));
    }
  }

  RankState state{launch_of(0, 3).membership(), fast_options()};
  PeerTable peers{state};
  std::vector<ControlChannel> leaves;
  const Clock::time_point joined_at = Clock::now();
  const std::string self = "rank 0 (" + state.host + ")";
};

detail::Contribution contribution_of(uint64_t sequence, CollectiveKind kind,
                                     const std::string& value = {}, uint32_t root = 0) {
  return {sequence, kind, root, "", value};
}

TEST_CASE("rounds: a collective is complete with the last rank's call", "[control_plane]") {
  Table table;
  CollectiveRounds rounds(table.peers, 1s);
  const auto now = Clock::now();
  const auto add = [&](int rank, uint64_t sequence, CollectiveKind kind, uint32_t root = 0) {
    return rounds.add(rank, contribution_of(sequence, kind, "of " + std::to_string(rank), root),
                      now);
  };
  REQUIRE_FALSE(add(2, 0, CollectiveKind::AllGather).result);
  REQUIRE_FALSE(add(2, 1, CollectiveKind::Broadcast, 1).result);  // rank 2 is ahead
  REQUIRE_FALSE(add(0, 0, CollectiveKind::AllGather).result);
  REQUIRE(rounds.num_calls(0) == 1);
  REQUIRE(rounds.num_calls(1) == 0);
  REQUIRE(rounds.num_calls(2) == 2);
  REQUIRE_FALSE(rounds.pending_call(1));
  REQUIRE(rounds.pending_call(2)->sequence == 1);
  REQUIRE(rounds.pending_call(2)->name == "broadcast (root 1)");

  const auto gathered = add(1, 0, CollectiveKind::AllGather);
  REQUIRE(gathered.mismatch.empty());
  REQUIRE(gathered.result);
  REQUIRE(gathered.result->sequence == 0);
  REQUIRE(gathered.result->values == std::vector<std::string>{"of 0", "of 1", "of 2"});
  REQUIRE_FALSE(rounds.pending_call(0));
  REQUIRE(rounds.pending_call(2));

  REQUIRE_FALSE(add(0, 1, CollectiveKind::Broadcast, 1).result);
  REQUIRE(add(1, 1, CollectiveKind::Broadcast, 1).result->values ==
          std::vector<std::string>{"of 1"});
  REQUIRE_FALSE(add(0, 2, CollectiveKind::Barrier).result);
  REQUIRE_FALSE(add(0, 2, CollectiveKind::Barrier).result);  // a repeated call does not count
  REQUIRE_FALSE(add(1, 2, CollectiveKind::Barrier).result);
  REQUIRE(add(2, 2, CollectiveKind::Barrier).result->values.empty());
  REQUIRE(rounds.find_overdue(now + 1h).empty());
}

TEST_CASE("rounds: different calls are a mismatch that names both ranks", "[control_plane]") {
  Table table;
  table.peers.set_progress(1, {4, "backward"});
  CollectiveRounds rounds(table.peers, 1s);
  const auto now = Clock::now();
  rounds.add(0, contribution_of(0, CollectiveKind::Barrier), now);
  const auto other_kind = rounds.add(1, contribution_of(0, CollectiveKind::Gather, "", 2), now);
  REQUIRE_FALSE(other_kind.result);
  REQUIRE(other_kind.mismatch ==
          "ranks diverged: rank 1 (node1) called gather (root "
          "2) at step 4 where " +
              table.self + " called barrier before the first step on the control plane");
  auto other_activity = contribution_of(0, CollectiveKind::Barrier);
  other_activity.activity = "save";
  REQUIRE_THAT(rounds.add(2, other_activity, now).mismatch,
               Catch::Contains("rank 2 (node2) called barrier of 'save'"));

  // A rank that leaves is named first, whichever call came first.
  rounds.add(1, contribution_of(1, CollectiveKind::Close), now);
  REQUIRE(rounds.add(2, contribution_of(1, CollectiveKind::Barrier), now).mismatch ==
          "rank 1 (node1) left at step 4 while rank 2 (node2) called the control plane's barrier "
          "before the first step. All ranks make the same calls in the same order");
  REQUIRE(rounds.pending_call(1)->leaves);
}

TEST_CASE("rounds: a collective over its timeout names the missing ranks", "[control_plane]") {
  Table table;
  CollectiveRounds rounds(table.peers, 200ms);
  const auto now = Clock::now();
  rounds.add(1, contribution_of(0, CollectiveKind::AllGather), now);
  REQUIRE(rounds.find_overdue(now + 199ms).empty());
  REQUIRE(rounds.find_overdue(now + 200ms) ==
          "control plane: all_gather waited 200 ms for rank 0, 2");
  rounds.add(0, contribution_of(0, CollectiveKind::AllGather), now + 100ms);  // extends nothing
  REQUIRE(rounds.find_overdue(now + 200ms) == "control plane: all_gather waited 200 ms for rank 2");
}

detail::RankPosition waiting_in(uint64_t plane_call, uint64_t num_called = 0,
                                uint64_t pending = 0) {
  detail::RankPosition position;
  position.step = 4;
  position.plane_call = plane_call;
  position.groups.push_back({.id = "world",
                             .num_called = num_called,
                             .pending = pending,
                             .operation = pending == 0 ? "" : "all_reduce (sum of 8 Float)",
                             .waited = pending});
  return position;
}

TEST_CASE("waiting ranks: a long wait is reported once, with what the others do",
          "[control_plane]") {
  Table table;
  table.peers.set_progress(2, {3, "save"});
  WaitMonitor waits(table.peers, 300ms);
  const auto now = Clock::now();
  waits.set_position(1, waiting_in(1), now);
  REQUIRE(waits.waits(1));
  REQUIRE_FALSE(waits.waits(2));
  REQUIRE(waits.report_long_waits(now + 299ms).empty());
  waits.set_position(1, waiting_in(1), now + 299ms);  // the same wait goes on
  REQUIRE(waits.report_long_waits(now + 300ms) ==
          "rank 1 (node1) waits for 300 ms or longer; meanwhile " + table.self +
              " is before the first step, rank 2 (node2) is at step 3 in save");
  REQUIRE(waits.report_long_waits(now + 400ms).empty());

  waits.set_position(0, waiting_in(1), now + 400ms);
  REQUIRE(waits.report_long_waits(now + 700ms) ==
          table.self +
              " and 1 more wait for 300 ms or longer; meanwhile rank 2 (node2) is at "
              "step 3 in save");
  REQUIRE(waits.describe_busy({2}).empty());

  waits.set_position(1, {}, now + 700ms);
  REQUIRE_FALSE(waits.waits(1));
  waits.set_position(1, waiting_in(1), now + 800ms);  // another wait
  REQUIRE(waits.report_long_waits(now + 900ms).empty());
  REQUIRE_THAT(waits.report_long_waits(now + 1100ms), Catch::Contains("1 more wait"));
}

TEST_CASE("waiting ranks: a deadlock is found when a position changes", "[control_plane]") {
  Table table;
  CollectiveRounds rounds(table.peers, 10s);
  WaitMonitor waits(table.peers, 10s);
  const auto now = Clock::now();
  REQUIRE(waits.find_new_deadlock(rounds).empty());
  waits.set_position(2, waiting_in(0, 12, 12), now);
  REQUIRE(waits.find_new_deadlock(rounds).empty());  // rank 1 may still come
  rounds.add(1, contribution_of(0, CollectiveKind::Close), now);
  waits.set_position(1, waiting_in(1, 11), now);
  REQUIRE_THAT(waits.find_new_deadlock(rounds),
               Catch::Contains("rank 1 (node1) left at step 4 after 11 collectives, while rank 2 "
                               "(node2) waits at step 4 in all_reduce #12"));
  REQUIRE(waits.find_new_deadlock(rounds).empty());  // nothing changed
  waits.set_position(1, waiting_in(1, 11), now + 1s);
  REQUIRE(waits.find_new_deadlock(rounds).empty());
}

TEST_CASE("peer table: who may join and who is missing", "[control_plane]") {
  RankState state(launch_of(0, 3).membership(), fast_options());
  PeerTable peers(state);
  REQUIRE(peers.num_joined() == 1);
  REQUIRE(peers.missing() == std::vector<int>{1, 2});
  REQUIRE(peers.why_refused(hello_of(2)).empty());
  REQUIRE_THAT(peers.why_refused(hello_of(0)), Catch::Contains("two processes claim rank 0: "));
  REQUIRE_THAT(peers.why_refused(hello_of(3)), Catch::Contains("is not below WORLD_SIZE 3"));
  REQUIRE_THAT(peers.why_refused(hello_of(1, 4)), Catch::Contains("rank 1 (node1:101) has "
                                                                  "WORLD_SIZE 4"));
  auto pair = make_channels();
  peers.add(hello_of(2), std::move(pair.hub), Clock::now());
  REQUIRE_THAT(peers.why_refused(hello_of(2)),
               Catch::Contains("two processes claim rank 2: node2:102 and node2:102"));
  REQUIRE(peers.missing() == std::vector<int>{1});
  peers.disconnect(2);
  REQUIRE(peers.missing() == std::vector<int>{1});
  REQUIRE_FALSE(peers.why_refused(hello_of(2)).empty());  // its place stays taken
  REQUIRE_FALSE(peers.all_joined());
  peers.add(hello_of(1), make_channels().hub, Clock::now());
  REQUIRE(peers.all_joined());
}

TEST_CASE("peer table: frames go to their rank, or to all", "[control_plane]") {
  Table table;
  table.peers.send(2, FrameType::Exchanged, "for 2");
  table.peers.broadcast(FrameType::Heartbeat, "for all");
  table.peers.send(0, FrameType::Exchanged, "rank 0 has no connection");
  std::vector<Frame> first, second;
  REQUIRE(table.leaves[0].receive(first) == IoStatus::WouldBlock);
  REQUIRE(table.leaves[1].receive(second) == IoStatus::WouldBlock);
  REQUIRE(first.size() == 1);
  REQUIRE(first[0].payload == "for all");
  REQUIRE(second.size() == 2);
  REQUIRE(second[0].payload == "for 2");
  REQUIRE(table.state.num_frames_sent == 3);
  REQUIRE_FALSE(table.peers.has_unsent());

  // A peer that does not read leaves bytes for the background thread, which is notified.
  pollfd wake{table.state.wake.fd(), POLLIN, 0};
  REQUIRE(poll(&wake, 1, 0) == 0);
  table.peers.send(1, FrameType::Exchanged, std::string(1 << 20, 'x'));
  REQUIRE(table.peers.has_unsent());
  REQUIRE(poll(&wake, 1, 0) == 1);
}

TEST_CASE("peer table: a rank is alive while it sends frames", "[control_plane]") {
  Table table;
  const auto start = table.joined_at;
  REQUIRE_FALSE(table.peers.find_silent(start + 300ms, 300ms));
  table.leaves[0].queue(FrameType::Heartbeat, {});
  table.leaves[0].flush();

  std::vector<pollfd> watched{{-1, 0, 0}};
  REQUIRE(table.peers.events(1, watched) == 0);
  table.peers.add_sockets(watched);
  REQUIRE(watched.size() == 3);
  REQUIRE(poll(watched.data(), watched.size(), 1000) == 1);
  REQUIRE(table.peers.events(0, watched) == 0);
  REQUIRE(table.peers.events(1, watched) == POLLIN);
  REQUIRE(table.peers.events(2, watched) == 0);
  std::vector<Frame> frames;
  REQUIRE(table.peers.receive(1, start + 200ms, frames) == IoStatus::WouldBlock);
  REQUIRE(frames.size() == 1);
  REQUIRE(table.peers.find_silent(start + 301ms, 300ms) == 2);
  table.peers.disconnect(2);
  REQUIRE_FALSE(table.peers.find_silent(start + 500ms, 300ms));
  REQUIRE(table.peers.find_silent(start + 501ms, 300ms) == 1);
  REQUIRE(table.peers.any_connected());

  table.leaves.clear();
  frames.clear();
  REQUIRE(table.peers.receive(1, start + 600ms, frames) == IoStatus::Closed);
  REQUIRE_THAT(table.peers.why_closed(1), Catch::StartsWith("its connection closed"));
  REQUIRE(table.peers.find_silent(start + 501ms, 300ms) == 1);  // nothing was heard
  table.peers.disconnect(1);
  REQUIRE_FALSE(table.peers.any_connected());
}

TEST_CASE("peer table: progress and names for messages", "[control_plane]") {
  Table table;
  table.state.progress.set(9, "forward");
  table.peers.set_progress(1, {4, "save"});
  REQUIRE(table.peers.progress(0).step == 9);
  REQUIRE(table.peers.progress(1).where == "save");
  REQUIRE(table.peers.progress(2).step == -1);
  REQUIRE(table.peers.name(2) == "rank 2 (node2)");
  REQUIRE(detail::list_ranks({1, 4}) == "1, 4");
  REQUIRE_THAT(detail::list_ranks(std::vector<int>(70, 3)), Catch::EndsWith("3, … (70 in all)"));
}

// An acceptor at a port of this host, served by hand.
struct Door {
  explicit Door(std::size_t max_newcomers)
      : Door(*detail::listen_tcp("127.0.0.1", 0), max_newcomers) {}
  Door(detail::Listener listener, std::size_t max_newcomers)
      : port(listener.port), acceptor(std::move(listener), "secret", max_newcomers) {}

  UniqueFd connect() const {
    std::string why;
    return detail::connect_tcp("127.0.0.1", port, Clock::now() + 5s, why);
  }
  std::size_t num_newcomers(Clock::time_point now) const {
    std::vector<pollfd> watched;
    acceptor.add_sockets(watched, now);
    return watched.size() - 1;
  }
  void serve(Clock::time_point now) {
    acceptor.serve(now, [this](const Hello& hello, ControlChannel channel) {
      admitted.push_back(hello.rank);
      channels.push_back(std::move(channel));
    });
  }

  const int port;
  PeerAcceptor acceptor;
  std::vector<uint32_t> admitted;
  std::vector<ControlChannel> channels;
};

TEST_CASE("peer acceptor: who knows the secret is admitted, or refused with a reason",
          "[control_plane]") {
  Door door(4);
  std::optional<ControlChannel> leaf;
  std::thread peer([&] {
    leaf = detail::connect_to_hub("127.0.0.1", door.port, "secret", hello_of(2), Clock::now() + 5s);
  });
  const auto stranger = door.connect();
  for (int i = 0; i < 5000 && door.admitted.empty(); ++i) {
    door.serve(Clock::now());
    std::this_thread::sleep_for(1ms);
  }
  peer.join();
  REQUIRE(door.admitted == std::vector<uint32_t>{2});
  REQUIRE(door.num_newcomers(Clock::now()) == 1);  // the stranger stays for a while
  REQUIRE(leaf);

  door.acceptor.refuse(std::move(door.channels[0]), "this place is taken", Clock::now());
  door.acceptor.flush_refused(Clock::now());
  std::vector<Frame> frames;
  REQUIRE(detail::wait_for(leaf->fd(), false, Clock::now() + 5s));
  leaf->receive(frames);
  REQUIRE(frames.size() == 1);
  const auto cause = detail::try_decode_message<FailureCause>(frames[0].payload);
  REQUIRE(cause);
  REQUIRE(cause->message == "this place is taken");
  REQUIRE(cause->exit_code == ExitCode::Settings);

  door.serve(Clock::now() + 10s);
  REQUIRE(door.num_newcomers(Clock::now()) == 0);  // its time is over
  REQUIRE(door.admitted.size() == 1);
}

TEST_CASE("peer acceptor: the oldest stranger makes room, but not at once", "[control_plane]") {
  Door door(2);
  const auto now = Clock::now();
  const auto first = door.connect(), second = door.connect();
  for (int i = 0; i < 5000 && door.num_newcomers(now) < 2; ++i) {
    door.serve(now);
    std::this_thread::sleep_for(1ms);
  }
  const auto is_closed = [](const UniqueFd& fd) {
    std::string bytes;
    while (detail::wait_for(fd.get(), false, Clock::now() + 200ms)) {
      if (detail::read_some(fd.get(), bytes, 1 << 16) == IoStatus::Closed) {
        return true;
      }
    }
    return false;
  };
  const auto third = door.connect();
  door.serve(now + 19ms);
  REQUIRE_FALSE(is_closed(first));
  door.serve(now + 20ms);
  REQUIRE(is_closed(first));
  REQUIRE_FALSE(is_closed(second));
  REQUIRE(door.num_newcomers(now) == 2);
  REQUIRE(door.acceptor.problem().empty());
}

}  // namespace
}  // namespace ddp::test
