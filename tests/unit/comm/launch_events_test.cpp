// SPDX-License-Identifier: Apache-2.0
// Events shared by consecutive launches: never too early, late within bounds, few.
#include "comm/nccl/launch_events.hpp"

#include <atomic>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "support/catch.hpp"

namespace {

// An event is the number of launches enqueued when it was recorded.
struct Stream {
  std::atomic<int64_t> enqueued{0};
  std::atomic<int> num_events{0};
  using Events = ddp::detail::LaunchEvents<std::optional<int64_t>>;
  Events events{[this] {
    ++num_events;
    return std::optional(enqueued.load());
  }};

  Events::Launch launch(bool shares_event = true) {
    if (!shares_event) {
      events.record_open();
    }
    ++enqueued;
    return events.add(shares_event);
  }
  // Returns the event that the stream waited for; 0: it did not wait.
  int64_t join(const Events::Launch& launch, uint64_t stream) {
    int64_t waited = 0;
    events.wait_on(stream, launch, [&](const auto& event) { waited = *event; });
    return waited;
  }
};

}  // namespace

TEST_CASE("small launches in a row share one event, and a stream waits for it once") {
  Stream stream;
  std::vector<Stream::Events::Launch> launches;
  for (int i = 0; i < 5; ++i) {
    launches.push_back(stream.launch());
  }
  CHECK(stream.num_events == 0);
  CHECK(stream.join(launches[2], 7) == 5);  // out of order
  for (const auto& launch : launches) {
    CHECK(stream.join(launch, 7) == 0);
  }
  CHECK(stream.num_events == 1);
  CHECK(stream.join(launches[0], 8) == 5);  // another stream
  CHECK(stream.join(launches[4], 7) == 5);  // only the last waiting stream is cached
  CHECK(stream.join(launches[4], 0) == 5);  // streams without a number always wait
  CHECK(stream.join(launches[4], 0) == 5);
  CHECK(stream.join(launches[4], 7) == 5);

  const auto next = stream.launch();
  CHECK(stream.join(next, 7) == 6);
  CHECK(stream.num_events == 2);
  CHECK(stream.join(launches[0], 7) == 0);
}

TEST_CASE("a launch that does not share has its event at once, and nobody before waits for it") {
  Stream stream;
  const auto first = stream.launch();
  const auto second = stream.launch();
  const auto large = stream.launch(false);
  CHECK(stream.num_events == 2);
  const auto after = stream.launch();
  CHECK(*stream.events.event_of(first) == 2);
  CHECK(*stream.events.event_of(second) == 2);
  CHECK(*stream.events.event_of(large) == 3);
  CHECK(stream.num_events == 2);
  CHECK(*stream.events.event_of(after) == 4);
  CHECK(*stream.events.event_of(after) == 4);  // queried again
  CHECK(stream.num_events == 3);
  stream.events.record_open();  // no event is open
  CHECK(stream.num_events == 3);
}

TEST_CASE("a long row is cut, so that nobody waits for much more than his own") {
  constexpr int kMost = Stream::Events::kMostShared;
  Stream stream;
  std::vector<Stream::Events::Launch> launches;
  for (int i = 0; i < 3 * kMost; ++i) {
    launches.push_back(stream.launch());
  }
  CHECK(stream.num_events == 3);
  for (int i = 0; i < 3 * kMost; ++i) {
    CHECK(*stream.events.event_of(launches[static_cast<size_t>(i)]) == (i / kMost + 1) * kMost);
  }
}

TEST_CASE("an event that could not be recorded is recorded later") {
  bool fails = true;
  int64_t recorded = 0;
  ddp::detail::LaunchEvents<std::optional<int64_t>> events([&] {
    if (fails) {
      throw std::runtime_error("no event");
    }
    return std::optional(++recorded);
  });
  const auto launch = events.add(true);
  CHECK_THROWS(events.event_of(launch));
  CHECK_THROWS(events.wait_on(7, launch, [](const auto&) {}));
  CHECK_THROWS(events.add(false));
  fails = false;
  bool waited = false;
  events.wait_on(7, launch, [&](const auto&) { waited = true; });
  CHECK(waited);
}

TEST_CASE("whoever waits in another thread waits for his launch at least") {
  Stream stream;
  constexpr int kLaunches = 20'000;
  std::vector<Stream::Events::Launch> launches(kLaunches);
  std::atomic<int> num_launched{0};
  std::atomic<int> num_early{0};
  const auto waiter = [&](uint64_t number) {
    std::mt19937 random(static_cast<unsigned>(number));
    int64_t joined = 0;
    for (int launched = 0; launched < kLaunches;) {
      launched = num_launched.load(std::memory_order_acquire);
      if (launched == 0) {
        continue;
      }
      const auto which = random() % static_cast<unsigned>(launched);
      joined = std::max(joined, stream.join(launches[which], number));
      num_early += joined < static_cast<int64_t>(which) + 1 ? 1 : 0;
    }
  };
  std::thread one(waiter, 1);
  std::thread two(waiter, 2);
  for (int i = 0; i < kLaunches; ++i) {
    launches[static_cast<size_t>(i)] = stream.launch(i % 50 != 49);
    num_launched.store(i + 1, std::memory_order_release);
  }
  one.join();
  two.join();
  CHECK(num_early == 0);
}
