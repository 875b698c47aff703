// SPDX-License-Identifier: Apache-2.0
// Features of the MPI communicator alone: cut messages, timeouts, aborts, its runtime. There is no
// Context: the program owns MPI, so that a communicator may break without ending the job.
#include <ATen/ATen.h>

#include <cmath>
#include <cstdlib>
#include <future>
#include <thread>

#include "comm/job/create_communicator.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::ReduceOp;
using ddp::detail::CollectiveFailure;
using ddp::detail::MpiCommunicatorOptions;
using ddp::detail::MpiRuntime;

// One MPI per process; the last test ends it.
MpiRuntime& runtime_reference(const std::shared_ptr<MpiRuntime>& runtime) {
  return *runtime;
}
const std::shared_ptr<MpiRuntime>& runtime() {
  static const auto made = MpiRuntime::create(60s);
  return made;
}
ddp::CommunicatorPtr make(const MpiCommunicatorOptions& options = {}) {
  return ddp::detail::make_mpi_communicator(runtime(), options);
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ddp::PeerLostError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

float sum_of_ranks() {
  const int n = runtime()->world_size();
  return static_cast<float>(n * (n + 1)) / 2;
}

}  // namespace

TEST_CASE("the runtime's broadcast, before any communicator") {
  auto& mpi = runtime_reference(runtime());
  for (int root = 0; root < mpi.world_size(); ++root) {
    const std::string secret = "secret of " + std::to_string(root);
    CHECK(mpi.broadcast(mpi.rank() == root ? secret : "", root, 10s) == secret);
  }
  const std::string big(100'000, 'x');
  CHECK(mpi.broadcast(mpi.rank() == 0 ? big : "", 0, 10s) == big);
  CHECK(mpi.broadcast("", 0, 10s).empty());
}

TEST_CASE("messages are cut where their count is too large for one call") {
  MpiCommunicatorOptions options;
  options.max_count = 7;
  auto comm = make(options);
  const int rank = comm->rank();
  const int world_size = comm->world_size();
  const auto mine = [&](int64_t n) { return at::arange(n, at::kFloat) * (rank + 1); };
  for (const int64_t n : {1, 7, 8, 50}) {
    INFO(n << " elements a rank");
    const auto sum = at::arange(n * world_size, at::kFloat) * sum_of_ranks();
    auto reduced = mine(n * world_size);
    comm->all_reduce(reduced)->wait();
    REQUIRE(reduced.equal(sum));
    auto part = at::zeros({n});
    comm->reduce_scatter(part, mine(n * world_size))->wait();
    REQUIRE(part.equal(sum.slice(0, rank * n, (rank + 1) * n)));
    auto in_place = mine(n * world_size);
    auto own = in_place.slice(0, rank * n, (rank + 1) * n);
    comm->reduce_scatter(own, in_place, ReduceOp::Avg)->wait();
    REQUIRE(own.equal(sum.slice(0, rank * n, (rank + 1) * n) / world_size));
    auto halves = mine(n).to(at::kHalf).remainder(16);
    auto gathered = at::zeros({n * world_size}, at::kHalf);
    comm->all_gather(gathered, halves)->wait();
    REQUIRE(gathered.slice(0, rank * n, (rank + 1) * n).equal(halves));
    REQUIRE(gathered.slice(0, 0, n).equal(at::arange(n, at::kFloat).to(at::kHalf).remainder(16)));
    auto told = mine(n);
    comm->broadcast(told, world_size - 1)->wait();
    REQUIRE(told.equal(at::arange(n, at::kFloat) * world_size));
    if (world_size > 1 && rank < 2) {
      auto message = mine(n);
      (rank == 0 ? comm->send(message, 1) : comm->recv(message, 0))->wait();
      REQUIRE(message.equal(at::arange(n, at::kFloat)));
    }
  }
}

TEST_CASE("half types round once a pair, and the mean is divided in float32") {
  auto comm = make();
  const int rank = comm->rank();
  const int world_size = comm->world_size();
  // The sum is exact in float32 and rounds once to bfloat16.
  auto tensor = at::full({3}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
  comm->all_reduce(tensor)->wait();
  if (world_size == 2) {
    CHECK(tensor[0].item<float>() == 256.0F);  // 257 lies between 256 and 258 and rounds to even
  }
  auto mean = at::full({3}, rank == 0 ? 1.0 : 2.0, at::kHalf);
  comm->all_reduce(mean, ReduceOp::Avg)->wait();
  const float expected =
      (1.0F + 2.0F * static_cast<float>(world_size - 1)) / static_cast<float>(world_size);
  CHECK(mean[0].item<float>() == expected);
}

TEST_CASE("the mean of float32 and float64 is the sum, divided") {
  auto comm = make();
  auto thirds = comm->split(comm->rank() < 3 ? 0 : -1, comm->rank());
  if (comm->world_size() < 3 || !thirds) {
    return;
  }
  auto single = at::full({3}, std::exp2(thirds->rank()), at::kFloat);
  auto twice = single.to(at::kDouble);
  thirds->all_reduce(single, ReduceOp::Avg)->wait();
  thirds->all_reduce(twice, ReduceOp::Avg)->wait();
  CHECK(single[0].item<float>() == 7.0F / 3.0F);  // 1/3 + 2/3 + 4/3 rounds to another number
  CHECK(twice[0].item<double>() == 7.0 / 3.0);
}

TEST_CASE("a late collective names itself, fails once and ends its communicator") {
  std::promise<CollectiveFailure> told;
  MpiCommunicatorOptions options;
  options.timeout = 200ms;
  options.first_step_timeout = 60s;
  options.on_failure = [&](const CollectiveFailure& failure) { told.set_value(failure); };
  auto world = make();
  if (world->world_size() == 1) {
    return;  // no rank can be late
  }
  auto victim = make(options)->split(0, world->rank());
  victim->all_reduce(at::ones({4}))->wait();  // the first-step timeout applies
  victim->set_step(3);
  auto tensor = at::ones({10});
  ddp::WorkPtr work;
  if (world->rank() == 0) {
    work = victim->all_reduce(tensor);
    auto behind = victim->all_reduce(at::ones({2}));
    const auto message = error_of([&] { work->wait(); });
    CHECK(contains(message, "all_reduce #2 (sum of 10 Float, 40 bytes)"));
    CHECK(contains(message, "200 ms"));
    const auto failure = told.get_future().get();
    CHECK(contains(failure.collective, "all_reduce #2"));
    CHECK(failure.step == 3);
    CHECK(contains(error_of([&] { behind->wait(); }), "all_reduce #2"));  // ended by the first
    CHECK(contains(error_of([&] { victim->barrier(); }), "all_reduce #2"));
  }
  world->barrier();
  if (world->rank() != 0) {  // late calls let MPI end in order
    victim->all_reduce(tensor);
    victim->all_reduce(at::ones({2}));
  }
  world->barrier();
}

TEST_CASE("abort wakes all waiters with its reason") {
  auto world = make();
  auto victim = world->split(0, world->rank());
  auto grandchild = victim->split(0, world->rank());
  if (world->world_size() == 1) {
    victim->abort("enough");
    CHECK(contains(error_of([&] { grandchild->barrier(); }), "enough"));
    return;
  }
  std::vector<ddp::WorkPtr> works;
  if (world->rank() == 0) {
    works.push_back(victim->all_reduce(at::ones({1000})));
    works.push_back(victim->all_gather(at::zeros({world->world_size()}), at::ones({1})));
    works.push_back(grandchild->all_reduce(at::ones({5})));
    std::vector<std::future<std::string>> waiters;
    for (const auto& work : works) {
      waiters.push_back(
          std::async(std::launch::async, [&] { return error_of([&] { work->wait(); }); }));
    }
    std::this_thread::sleep_for(50ms);
    CHECK(error_of([&] { works[0]->wait_host(10ms); }).find("did not end within 10 ms") !=
          std::string::npos);
    victim->abort("rank 1 (node7) failed: out of memory");
    for (auto& waiter : waiters) {
      REQUIRE(waiter.wait_for(5s) == std::future_status::ready);
      CHECK(contains(waiter.get(), "rank 1 (node7) failed: out of memory"));
    }
  }
  world->barrier();
  if (world->rank() != 0) {  // lets MPI end in order
    victim->all_reduce(at::ones({1000}));
    victim->all_gather(at::zeros({world->world_size()}), at::ones({1}));
    grandchild->all_reduce(at::ones({5}));
  }
  world->barrier();
}

TEST_CASE("ranks whose sizes differ are told so") {
  auto world = make();
  if (world->world_size() == 1) {
    return;
  }
  for (const int64_t size : {20, 5}) {
    auto victim = world->split(world->rank() < 2 ? 0 : -1, world->rank());
    if (world->rank() == 0) {
      victim->send(at::ones({size}), 1)->wait();
    } else if (world->rank() == 1) {
      auto work = victim->recv(at::ones({10}), 0);
      CHECK_THROWS_AS(work->wait(), ddp::MismatchError);
    }
    world->barrier();
  }
}

TEST_CASE("parts of an exchange whose sizes differ are told in its own call") {
  auto world = make();
  if (world->world_size() == 1) {
    return;
  }
  for (const auto& [sent, expected] : {std::pair{1, 2}, {2, 1}, {1, 0}, {0, 1}}) {
    CAPTURE(sent, expected);
    auto victim = world->split(world->rank() < 2 ? 0 : -1, world->rank());
    if (world->rank() < 2) {
      const bool is_odd = world->rank() == 1;
      const std::vector<int64_t> to = {is_odd ? sent : 1, 1};
      const std::vector<int64_t> from = {1, is_odd ? 1 : expected};
      auto work = victim->all_to_all(at::zeros({from[0] + from[1], 3}),
                                     at::ones({to[0] + to[1], 3}), from, to);
      if (is_odd) {
        work->wait();
      } else {
        CHECK_THROWS_AS(work->wait(), ddp::MismatchError);
      }
    }
    world->barrier();
  }
}

TEST_CASE("a communicator dropped with work under way ends that work") {
  auto tensor = at::ones({1 << 16});
  ddp::WorkPtr work;
  {
    auto group = make()->split(0, runtime()->rank());
    work = group->all_reduce(tensor);
  }
  work->wait();
  CHECK(tensor.eq(static_cast<float>(runtime()->world_size())).all().item<bool>());
}

// A model, an optimizer or a wire may hold the last reference to a communicator.
TEST_CASE("the runtime ends in order, with communicators dropped just before and after") {  // last
  auto world = make();
  auto dropped = world->split(0, world->rank());
  world->barrier();
  // Rank 0's MPI thread waits here for the others, then gets the rest of this test at once.
  std::this_thread::sleep_for(world->rank() == 0 ? 0ms : 300ms);
  auto kept = std::async(std::launch::async, [&] { return world->split(0, world->rank()); });
  if (world->rank() == 0) {
    std::this_thread::sleep_for(100ms);
  } else {
    kept.wait();
  }
  dropped.reset();
  runtime()->finalize();
  runtime()->finalize();
  runtime()->abandon("too late to matter");
}
