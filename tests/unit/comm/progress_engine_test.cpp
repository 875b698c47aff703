// SPDX-License-Identifier: Apache-2.0
// Free of LibTorch: also runs under the thread sanitizer.
#include "comm/mpi/progress_engine.hpp"

#include <future>
#include <stdexcept>
#include <string>

#include "support/catch.hpp"

namespace {

using namespace std::chrono_literals;

// State shared by the operations of one test; the engine's thread writes, the test reads.
struct Journal {
  std::mutex mutex;
  std::vector<int> started;
  std::vector<std::string> failures;
};

struct FakeOperation {
  Journal* journal = nullptr;
  int id = 0;
  std::shared_future<void> may_start = {};   // start() blocks until ready, like a blocking call
  std::shared_future<void> may_finish = {};  // poll() returns false until ready
  bool start_throws = false;
  bool poll_throws = false;
  std::chrono::milliseconds limit{0};
  std::shared_ptr<int> memory = std::make_shared<int>(0);

  void start() {
    if (may_start.valid()) {
      may_start.wait();
    }
    {
      const std::lock_guard lock(journal->mutex);
      journal->started.push_back(id);
    }
    if (start_throws) {
      throw std::runtime_error("start failed");
    }
  }
  bool poll() {
    if (poll_throws) {
      throw std::runtime_error("poll failed");
    }
    return !may_finish.valid() || may_finish.wait_for(0s) == std::future_status::ready;
  }
  std::chrono::milliseconds timeout() const { return limit; }
  std::exception_ptr timed_out() const {
    return std::make_exception_ptr(std::runtime_error("late: " + std::to_string(id)));
  }
  void failed(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      const std::lock_guard lock(journal->mutex);
      journal->failures.emplace_back(e.what());
    }
  }
};

using Engine = ddp::detail::ProgressEngine<FakeOperation>;

std::shared_ptr<FakeOperation> make(Journal& journal, int id) {
  auto operation = std::make_shared<FakeOperation>();
  operation->journal = &journal;
  operation->id = id;
  return operation;
}

std::exception_ptr reason(const std::string& text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

std::string error_of(Engine::Ticket& ticket) {
  try {
    ticket.wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("operations start in the order of submission and finish in any") {
  Journal journal;
  Engine engine;
  auto lane = engine.make_lane();
  std::vector<std::promise<void>> promises(100);
  std::vector<Engine::TicketPtr> tickets;
  for (int i = 0; i < 100; ++i) {
    auto operation = make(journal, i);
    operation->may_finish = promises[static_cast<size_t>(i)].get_future().share();
    tickets.push_back(engine.submit(lane, operation));
  }
  for (int i = 99; i >= 0; --i) {  // completed backwards
    const auto at = static_cast<size_t>(i);
    CHECK_FALSE(tickets[at]->is_finished());
    promises[at].set_value();
    tickets[at]->wait();
    CHECK(tickets[at]->is_finished());
  }
  const std::lock_guard lock(journal.mutex);
  REQUIRE(journal.started.size() == 100);
  for (int i = 0; i < 100; ++i) {
    CHECK(journal.started[static_cast<size_t>(i)] == i);
  }
}

TEST_CASE("the memory of an operation is let go before its waiter goes on") {
  Journal journal;
  Engine engine;
  auto lane = engine.make_lane();
  for (int i = 0; i < 200; ++i) {
    auto operation = make(journal, i);
    std::weak_ptr<int> memory = operation->memory;
    auto ticket = engine.submit(lane, std::move(operation));
    ticket->wait();
    REQUIRE(memory.expired());
  }
}

TEST_CASE("a failure reaches its waiter and the operation, and no other") {
  Journal journal;
  Engine engine;
  auto lane = engine.make_lane();
  auto bad_start = make(journal, 0);
  bad_start->start_throws = true;
  auto bad_poll = make(journal, 1);
  bad_poll->poll_throws = true;
  auto first = engine.submit(lane, bad_start);
  auto second = engine.submit(lane, bad_poll);
  auto third = engine.submit(lane, make(journal, 2));
  CHECK(error_of(*first) == "start failed");
  CHECK(error_of(*second) == "poll failed");
  CHECK(error_of(*third).empty());
  CHECK(engine.stop(5s));
  CHECK(journal.failures == std::vector<std::string>{"start failed", "poll failed"});
}

TEST_CASE("a late operation fails with its own words") {
  Journal journal;
  Engine engine;
  auto lane = engine.make_lane();
  std::promise<void> never;
  auto operation = make(journal, 7);
  operation->may_finish = never.get_future().share();
  operation->limit = 50ms;
  const auto begin = std::chrono::steady_clock::now();
  auto ticket = engine.submit(lane, operation);
  CHECK_FALSE(ticket->wait_for(5ms));
  CHECK(error_of(*ticket) == "late: 7");
  const auto taken = std::chrono::steady_clock::now() - begin;
  CHECK(taken >= 50ms);
  CHECK(taken < 5s);
  never.set_value();
}

TEST_CASE("abort wakes all waiters of its lane and leaves the others alone") {
  Journal journal;
  Engine engine;
  auto doomed = engine.make_lane();
  auto healthy = engine.make_lane();
  std::promise<void> never;
  std::promise<void> later;
  auto stuck = make(journal, 0);
  stuck->may_finish = never.get_future().share();
  auto slow = make(journal, 1);
  slow->may_finish = later.get_future().share();
  auto stuck_ticket = engine.submit(doomed, stuck);
  auto slow_ticket = engine.submit(healthy, slow);
  std::vector<std::future<std::string>> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.push_back(std::async(std::launch::async, [&] { return error_of(*stuck_ticket); }));
  }
  std::this_thread::sleep_for(20ms);
  engine.abort(doomed, reason("rank 2 is gone"));
  engine.abort(doomed, reason("a later reason"));
  for (auto& waiter : waiters) {
    CHECK(waiter.get() == "rank 2 is gone");
  }
  CHECK_THROWS_WITH(engine.submit(doomed, make(journal, 2)), "rank 2 is gone");
  CHECK_FALSE(slow_ticket->is_finished());
  later.set_value();
  CHECK(error_of(*slow_ticket).empty());
  const std::lock_guard lock(journal.mutex);
  CHECK(journal.failures.empty());  // an abort is not the operation's failure
  never.set_value();
}

TEST_CASE("abort wakes waiters while the thread is stuck inside a call") {
  Journal journal;
  auto engine = std::make_unique<Engine>();
  auto lane = engine->make_lane();
  std::promise<void> release;
  auto blocking = make(journal, 0);
  blocking->may_start = release.get_future().share();
  auto first = engine->submit(lane, blocking);
  auto second = engine->submit(lane, make(journal, 1));
  std::this_thread::sleep_for(10ms);
  engine->abort(lane, reason("rank 1 is gone"));
  CHECK(error_of(*first) == "rank 1 is gone");
  CHECK(error_of(*second) == "rank 1 is gone");
  CHECK_FALSE(engine->stop(20ms));  // the thread is still running
  release.set_value();
  engine.reset();
  for (int i = 0; i < 500; ++i) {  // the remaining thread must stop using `journal`
    {
      const std::lock_guard lock(journal.mutex);
      if (!journal.started.empty()) {
        break;
      }
    }
    std::this_thread::sleep_for(10ms);
  }
  const std::lock_guard lock(journal.mutex);
  CHECK(journal.started == std::vector<int>{0});  // the queued operations never started
}

TEST_CASE("stop carries out what was submitted") {
  Journal journal;
  Engine engine;
  auto lane = engine.make_lane();
  std::vector<Engine::TicketPtr> tickets;
  for (int i = 0; i < 50; ++i) {
    tickets.push_back(engine.submit(lane, make(journal, i)));
  }
  CHECK(engine.stop(5s));
  for (const auto& ticket : tickets) {
    CHECK(ticket->is_finished());
  }
  CHECK(journal.started.size() == 50);
  CHECK(engine.stop(5s));
}

TEST_CASE("several threads submit, wait and abort at once") {
  Journal journal;
  Engine engine;
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  std::atomic<int> aborted{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      auto lane = engine.make_lane();
      for (int i = 0; i < 100; ++i) {
        try {
          auto ticket = engine.submit(lane, make(journal, i));
          if (t == 3 && i == 60) {
            engine.abort(lane, reason("enough"));
          }
          ticket->wait();
          ++ended;
        } catch (const std::runtime_error&) {
          ++aborted;
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(ended + aborted == 400);
  CHECK(ended >= 360);
  CHECK(aborted >= 39);
}
