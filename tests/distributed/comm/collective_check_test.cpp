// SPDX-License-Identifier: Apache-2.0
// check_collectives: ranks with different calls get an error, on the backend of the device. The
// test programs' context enables the check (checks_collectives).
#include "comm/collective_check.hpp"

#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/collective_label.hpp"
#include "ddp/core/error.hpp"
#include "distributed/comm/communicator_test_utils.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/multi_rank_main.hpp"

using namespace communicator_tests;
using namespace std::chrono_literals;

namespace {

// False for a single rank, or if the check is disabled for this run.
bool is_compared() {
  return comm().world_size() > 1 && ddp::test::checks_collectives();
}

// Rank 1 calls `odd`, the others `call`; the error on every rank names both.
void expect_mismatch(const std::function<void()>& call, const std::string& called,
                     const std::function<void()>& odd, const std::string& odd_called) {
  const auto message = testing::message_of<ddp::MismatchError>(comm().rank() == 1 ? odd : call);
  CHECK_THAT(message, Catch::Contains("of the world differs: rank 0 called " + called +
                                      ", rank 1 called " + odd_called + ";"));
}

at::Tensor ones(int64_t numel, at::ScalarType dtype = at::kFloat) {
  return here(at::ones({numel}, dtype));
}

// No other rank makes a call.
struct LonelyExchange final : ddp::detail::GroupExchange {
  std::map<int, std::string> exchange(uint64_t, int, const std::string&,
                                      const std::function<void()>& look) override {
    for (;;) {
      std::this_thread::sleep_for(1ms);
      look();
    }
  }
};

}  // namespace

TEST_CASE("calls that differ between ranks throw on all of them, and nothing was sent") {
  if (!is_compared()) {
    return;
  }
  const int world_size = comm().world_size();
  auto mine = here(data_of(comm().rank(), 8, at::kFloat));
  const auto before = mine.clone();
  const auto sum = [&] { comm().all_reduce(mine)->wait(); };
  const std::string sum_called = "all_reduce (sum of 8 Float)";
  expect_mismatch(
      sum, sum_called, [] { comm().all_reduce(ones(8, at::kDouble))->wait(); },
      "all_reduce (sum of 8 Double)");
  expect_mismatch(
      sum, sum_called, [] { comm().all_reduce(ones(500'000))->wait(); },
      "all_reduce (sum of 500000 Float)");
  expect_mismatch(
      sum, sum_called, [] { comm().all_reduce(ones(8), ReduceOp::Max)->wait(); },
      "all_reduce (max of 8 Float)");
  expect_mismatch(
      sum, sum_called, [] { comm().broadcast(ones(8), 0)->wait(); }, "broadcast (8 Float, root 0)");
  expect_mismatch(
      sum, sum_called, [] { comm().barrier(); }, "barrier");
  const auto labeled = [&](const std::string& text) {
    return [&, text] {
      const auto label = ddp::detail::make_label(text);
      const ddp::detail::LabelScope scope(label);
      sum();
    };
  };
  expect_mismatch(labeled("bucket 0: a"), "all_reduce (sum of 8 Float; bucket 0: a)", sum,
                  sum_called);
  expect_mismatch([] { comm().broadcast(ones(8), 0)->wait(); }, "broadcast (8 Float, root 0)",
                  [] { comm().broadcast(ones(8), 1)->wait(); }, "broadcast (8 Float, root 1)");
  const auto gather = [&](int64_t numel) {
    return [=] { comm().all_gather(ones(numel * world_size), ones(numel))->wait(); };
  };
  const auto gathers = [&](int64_t numel) {
    return "all_gather (" + std::to_string(numel * world_size) + " Float)";
  };
  expect_mismatch(gather(3), gathers(3), gather(4), gathers(4));
  const auto scatter = [&](ReduceOp op) {
    return [=] { comm().reduce_scatter(ones(2), ones(2 * world_size), op)->wait(); };
  };
  const auto parts = " of " + std::to_string(2 * world_size) + " Float)";
  expect_mismatch(scatter(ReduceOp::Avg), "reduce_scatter (avg" + parts, scatter(ReduceOp::Sum),
                  "reduce_scatter (sum" + parts);
  expect_mismatch([] { comm().split(0, 0); }, "split", [] { comm().barrier(); }, "barrier");
  CHECK(mine.equal(before));
  sum();  // the ranks are still in step
  CHECK(mine.cpu().equal(reference(8, at::kFloat, ReduceOp::Sum, world_size)));
}

TEST_CASE("a group that was split off is compared by itself, and names ranks of the job") {
  if (!is_compared()) {
    return;
  }
  const int rank = comm().rank();
  const int half = comm().world_size() / 2;
  // With 4 ranks the lower two agree and the upper two do not.
  const int color = comm().world_size() == 2 ? 0 : rank / half;
  auto group = comm().split(color, rank);
  const int last = comm().world_size() - 1;
  const auto message = testing::message_of<ddp::MismatchError>(
      [&] { group->all_reduce(ones(rank == last ? 5 : 4))->wait(); });
  if (rank < last - 1) {
    CHECK(message.empty());
  } else {
    CHECK_THAT(
        message,
        Catch::Contains("color " + std::to_string(color) + " differs: rank " +
                        std::to_string(last - 1) + " called all_reduce (sum of 4 Float), rank " +
                        std::to_string(last) + " called all_reduce (sum of 5 Float)"));
  }
  group->barrier();
}

TEST_CASE("calls are compared inside a GroupScope") {
  if (!is_compared()) {
    return;
  }
  auto first = ones(8);
  ddp::WorkPtr work;
  std::string message;
  {
    const ddp::GroupScope group(comm());
    work = comm().all_reduce(first);
    message = testing::message_of<ddp::MismatchError>(
        [] { comm().all_reduce(ones(comm().rank() == 1 ? 3 : 2)); });
  }
  CHECK_THAT(message, Catch::Contains("rank 1 called all_reduce (sum of 3 Float)"));
  work->wait();
  CHECK(first.eq(static_cast<float>(comm().world_size())).all().item<bool>());
}

TEST_CASE("an abort ends the wait for ranks that do not call") {
  if (!is_compared()) {
    return;
  }
  auto group = comm().split(0, comm().rank());
  if (comm().rank() == 0) {
    std::thread aborts([&] {
      std::this_thread::sleep_for(50ms);
      group->abort("the test says so");
    });
    const auto message =
        testing::message_of<ddp::PeerLostError>([&] { group->all_reduce(ones(8))->wait(); });
    aborts.join();
    CHECK_THAT(message, Catch::Contains("the test says so"));
  }
  comm().barrier();
}

TEST_CASE("a rank that makes no call is waited for as long as a collective may last") {
  const auto alone = std::make_shared<LonelyExchange>();
  ddp::detail::CollectiveCheck check(alone, 3, "the world");
  const auto message =
      testing::message_of<ddp::PeerLostError>([&] { check.compare("barrier", 20ms, [] {}); });
  CHECK_THAT(message, Catch::Contains("collective #1 of the world: this rank called barrier, and "
                                      "not all of the 3 ranks called a collective within 20 ms"));
}

TEST_CASE("a comparison shows where its rank waits, also in a group that was split off") {
  using Check = ddp::detail::CollectiveCheck;
  const auto exchange = std::make_shared<LonelyExchange>();
  std::vector<ddp::detail::PositionBoard::Probe> probes;
  auto world = std::make_shared<Check>(exchange, 3, "the world",
                                       [&](const auto& probe) { probes.push_back(probe); });
  auto group = world->of_group(1, 0, 2);
  REQUIRE(probes.size() == 2);
  const auto expect_wait = [&](Check& check, size_t index, const std::string& id) {
    const auto look = [&] {
      const auto position = probes[index]();
      CHECK(position.id == id);
      CHECK(position.pending == 1);
      CHECK(position.waited == 1);
      CHECK(position.operation == "barrier");
      CHECK(position.is_check);
      CHECK(position.caller == std::this_thread::get_id());
      throw std::runtime_error("seen");
    };
    CHECK_THROWS_WITH(check.compare("barrier", 10s, look), "seen");
    const auto after = probes[index]();
    CHECK(after.num_called == 1);
    CHECK(after.pending == 0);
    CHECK(after.waited == 0);
  };
  expect_wait(*world, 0, "check of the world");
  expect_wait(*group, 1, "check of the world, split #1, color 0");
  group.reset();
  CHECK(probes[1]() == ddp::detail::GroupPosition{.id = "check of the world, split #1, color 0",
                                                  .num_called = 1,
                                                  .is_check = true,
                                                  .is_closed = true});
}

TEST_CASE("the time of a comparison", "[.bench]") {
  auto tensor = ones(256);
  constexpr int kRuns = 500;
  for (int round = 0; round < 3; ++round) {
    comm().barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRuns; ++i) {
      comm().all_reduce(tensor, ReduceOp::Max)->wait();
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (comm().rank() == 0) {
      std::printf("%s: %.1f us an all_reduce of 256 floats\n",
                  is_compared() ? "compared" : "not compared", took.count() / kRuns);
    }
  }
}
