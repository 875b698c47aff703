// SPDX-License-Identifier: Apache-2.0
// Groups of operations and of ranks, point to point, and invalid arguments, on the backend
// of the device (single, mpi, nccl).
#include <ATen/ATen.h>

#include <chrono>
#include <string>
#include <thread>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "distributed/comm/communicator_test_utils.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

using namespace communicator_tests;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

template <typename Action>
std::string settings_error(const Action& action) {
  try {
    action();
  } catch (const ddp::SettingsError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("a group of operations") {
  std::vector<at::Tensor> tensors;
  std::vector<ddp::WorkPtr> works;
  {
    const ddp::GroupScope group(comm());
    for (int i = 0; i < 5; ++i) {
      tensors.push_back(here(data_of(comm().rank(), 1000 + i, at::kFloat)));
      works.push_back(
          comm().all_reduce(tensors.back(), i % 2 == 0 ? ReduceOp::Sum : ReduceOp::Max));
    }
    tensors.push_back(here(data_of(comm().rank(), 77, at::kShort)));
    works.push_back(comm().all_reduce(tensors.back()));
  }
  for (int i = 0; i < 5; ++i) {
    const auto at = static_cast<size_t>(i);
    works[at]->wait();
    auto expected = reference(1000 + i, at::kFloat, ReduceOp::Sum, comm().world_size());
    if (i % 2 == 1) {
      expected = data_of(comm().world_size() - 1, 1000 + i, at::kFloat);
    }
    CHECK(tensors[at].cpu().equal(expected));
  }
  works.back()->wait();
  CHECK(tensors.back().cpu().equal(reference(77, at::kShort, ReduceOp::Sum, comm().world_size())));
}

// NCCL would delay such an operation until the group ends, after its wait has returned.
TEST_CASE("another communicator is refused inside a GroupScope") {
  auto other = comm().split(0, comm().rank());
  auto mine = here(at::ones({8}));
  auto theirs = here(at::ones({8}));
  ddp::WorkPtr work;
  {
    const ddp::GroupScope outer(comm());
    const ddp::GroupScope inner(comm());  // nesting with the same communicator is allowed
    work = comm().all_reduce(mine);
    CHECK(contains(settings_error([&] { other->all_reduce(theirs); }),
                   "all_reduce: a GroupScope of another communicator is open in this thread"));
    CHECK(contains(settings_error([&] { const ddp::GroupScope nested(*other); }), "GroupScope"));
    CHECK(contains(settings_error([&] { other->barrier(); }), "GroupScope"));
    CHECK(contains(settings_error([&] { other->split(0, 0); }), "GroupScope"));
  }
  work->wait();
  other->all_reduce(theirs)->wait();  // no operation is pending
  const auto expected = static_cast<float>(comm().world_size());
  CHECK(mine.eq(expected).all().item<bool>());
  CHECK(theirs.eq(expected).all().item<bool>());
}

TEST_CASE("another thread may use another communicator beside a GroupScope") {
  auto other = comm().split(0, comm().rank());
  auto mine = here(at::ones({8}));
  auto theirs = here(at::ones({8}));
  ddp::WorkPtr work;
  {
    const ddp::GroupScope group(comm());
    work = comm().all_reduce(mine);
    std::thread([&] { other->all_reduce(theirs)->wait_host(); }).join();
  }
  work->wait();
  CHECK(mine.eq(static_cast<float>(comm().world_size())).all().item<bool>());
  CHECK(theirs.eq(static_cast<float>(comm().world_size())).all().item<bool>());
}

TEST_CASE("send and recv around a ring, and from one rank to another") {
  const int world_size = comm().world_size();
  if (world_size == 1) {
    CHECK(
        contains(settings_error([] { comm().send(here(at::ones({1})), 0); }), "this rank itself"));
    return;
  }
  const int rank = comm().rank();
  const int next = (rank + 1) % world_size;
  const int previous = (rank + world_size - 1) % world_size;
  for (const auto dtype : kDtypes) {
    auto mine = here(data_of(rank, 50, dtype));
    auto theirs = at::zeros_like(mine);
    ddp::WorkPtr sent;
    ddp::WorkPtr received;
    {
      const ddp::GroupScope group(comm());
      sent = comm().send(mine, next);
      received = comm().recv(theirs, previous);
    }
    received->wait();
    sent->wait();
    INFO(c10::toString(dtype));
    CHECK(theirs.cpu().equal(data_of(previous, 50, dtype)));
  }
  auto tensor = here(data_of(rank, 9, at::kLong));
  if (rank == 0) {
    comm().send(tensor, world_size - 1)->wait();
  } else if (rank == world_size - 1) {
    comm().recv(tensor, 0)->wait();
    CHECK(tensor.cpu().equal(data_of(0, 9, at::kLong)));
  }
}

TEST_CASE("nobody leaves a barrier before the last has come") {
  comm().barrier();
  const auto begin = std::chrono::steady_clock::now();
  if (comm().rank() == comm().world_size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  comm().barrier();
  // Subtracts 50 ms for the first barrier, which the ranks do not leave simultaneously.
  CHECK(std::chrono::steady_clock::now() - begin >=
        std::chrono::milliseconds(comm().world_size() == 1 ? 0 : 150));
}

TEST_CASE("split into groups of their own") {
  const int rank = comm().rank();
  const int world_size = comm().world_size();
  auto parity = comm().split(rank % 2, -rank);  // reversed order
  REQUIRE(parity != nullptr);
  const int size = (world_size + 1 - rank % 2) / 2;
  CHECK(parity->world_size() == size);
  CHECK(parity->rank() == size - 1 - rank / 2);
  auto tensor = here(at::full({10}, static_cast<float>(rank + 1)));
  auto on_world = here(at::ones({10}));
  auto first = parity->all_reduce(tensor);
  first->wait();  // avoids two communicators with collectives in flight on one GPU
  auto second = comm().all_reduce(on_world);
  second->wait();
  float expected = 0;
  for (int peer = rank % 2; peer < world_size; peer += 2) {
    expected += static_cast<float>(peer + 1);
  }
  CHECK(tensor.eq(expected).all().item<bool>());
  CHECK(on_world.eq(static_cast<float>(world_size)).all().item<bool>());

  auto without_zero = comm().split(rank == 0 ? -1 : 4, rank);
  CHECK((without_zero == nullptr) == (rank == 0));
  if (without_zero) {
    CHECK(without_zero->rank() == rank - 1);
    auto ones = here(at::ones({3}));
    without_zero->all_reduce(ones)->wait();
    CHECK(ones.eq(static_cast<float>(world_size - 1)).all().item<bool>());
  }
  auto nested = parity->split(0, parity->rank());
  CHECK(nested->world_size() == size);
  nested->barrier();
}

TEST_CASE("an aborted group ends, its parent goes on") {
  auto group = comm().split(0, comm().rank());
  group->abort("the test says so");
  group->abort("a later reason");
  try {
    group->all_reduce(here(at::ones({1})));
    FAIL("an aborted communicator went on");
  } catch (const ddp::PeerLostError& error) {
    CHECK(contains(error.what(), "the test says so"));
  }
  CHECK_THROWS_AS(group->barrier(), ddp::PeerLostError);
  CHECK_THROWS_AS(group->split(0, 0), ddp::PeerLostError);
  comm().barrier();
  auto ones = here(at::ones({3}));
  comm().all_reduce(ones)->wait();
  CHECK(ones.eq(static_cast<float>(comm().world_size())).all().item<bool>());
}

TEST_CASE("a wrong argument is an error on the rank that made it, and nothing was sent") {
  const int world_size = comm().world_size();
  const auto ones = here(at::ones({8}));
  CHECK(contains(settings_error([&] { comm().all_reduce(at::Tensor()); }), "undefined"));
  CHECK(contains(settings_error([&] { comm().all_reduce(ones.to(at::kInt), ReduceOp::Avg); }),
                 "avg of dtype Int"));
  CHECK(contains(settings_error([&] { comm().all_reduce(ones.slice(0, 0, 8, 2)); }), "contiguous"));
  CHECK(contains(settings_error([&] { comm().all_reduce(ones.to(at::kComplexFloat)); }), "dtype"));
  CHECK(contains(settings_error([&] { comm().broadcast(ones, world_size); }),
                 "root=" + std::to_string(world_size)));
  CHECK(contains(settings_error([&] { comm().all_gather(ones, ones.to(at::kHalf)); }), "dtype"));
  CHECK(contains(settings_error([&] { comm().reduce_scatter(here(at::ones({7})), ones); }), "7"));
  if (comm().device().is_cuda()) {
    CHECK(contains(settings_error([&] { comm().all_reduce(at::ones({1})); }), "cpu"));
  } else {
    CHECK(contains(settings_error([&] { comm().all_reduce(at::ones({1}, at::kMeta)); }), "meta"));
  }
  comm().barrier();  // no operation is pending
}
