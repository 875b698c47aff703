// SPDX-License-Identifier: Apache-2.0
// Every operation over the ranks of the job, on whatever backend the device chooses (single, mpi,
// nccl). Data differ from rank to rank and all results are exact: small integers, and means over 1,
// 2 or 4 ranks.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

namespace {

using ddp::ReduceOp;

ddp::Communicator& comm() {
  return *ddp::test::context().communicator();
}

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                             at::kChar,  at::kShort,  at::kInt,  at::kLong,
                                             at::kByte,  at::kBool};
const std::vector<ReduceOp> kOps = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max,
                                    ReduceOp::Product};

// What rank `rank` gives: all results stay exact in float16 and bfloat16 (integers up to 200).
at::Tensor data_of(int rank, int64_t n, at::ScalarType dtype, ReduceOp op = ReduceOp::Sum) {
  const auto i = at::arange(n, at::kLong);
  at::Tensor values;
  if (dtype == at::kBool) {
    values = at::remainder(i + rank, 3).eq(0);
  } else if (op == ReduceOp::Product) {
    values = at::remainder(i + rank, 2) + 1;
  } else if (op == ReduceOp::Min || op == ReduceOp::Max) {
    values = at::remainder(i * 7 + rank * 3, 11) - (dtype == at::kByte ? 0 : 5);
  } else {
    values = (at::remainder(i, 5) + 1) * (rank + 1);
  }
  return values.to(dtype);
}

// One process over all ranks' data.
at::Tensor reference(int64_t n, at::ScalarType dtype, ReduceOp op, int world_size) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world_size; ++rank) {
    all.push_back(data_of(rank, n, dtype, op).to(at::kDouble));
  }
  const auto stacked = at::stack(all);
  at::Tensor result;
  switch (op) {
    case ReduceOp::Sum:
      result = stacked.sum(0);
      break;
    case ReduceOp::Avg:
      result = stacked.mean(0);
      break;
    case ReduceOp::Min:
      result = stacked.amin(0);
      break;
    case ReduceOp::Max:
      result = stacked.amax(0);
      break;
    case ReduceOp::Product:
      result = stacked.prod(0);
      break;
  }
  return result.to(dtype);  // bool: "or" for sum and max, "and" for product and min
}

at::Tensor here(const at::Tensor& tensor) {
  return tensor.to(comm().device(), /*non_blocking=*/false, /*copy=*/true);
}

std::string name_of(at::ScalarType dtype, ReduceOp op, int64_t n) {
  return std::string(ddp::to_string(op)) + " of " + std::to_string(n) + " " + c10::toString(dtype);
}

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

TEST_CASE("the communicator is the job's") {
  auto& context = ddp::test::context();
  CHECK(comm().rank() == context.rank());
  CHECK(comm().world_size() == context.world_size());
  CHECK(comm().device() == context.device());
  const std::string expected = context.world_size() == 1    ? "single"
                               : context.device().is_cuda() ? "nccl"
                                                            : "mpi";
  CHECK(std::string(comm().backend()) == expected);
}

TEST_CASE("all_reduce: every op of every dtype") {
  for (const auto dtype : kDtypes) {
    for (const auto op : kOps) {
      if (op == ReduceOp::Avg && !at::isFloatingType(dtype)) {
        continue;
      }
      for (const int64_t n : {0, 1, 5, 1000}) {
        INFO(name_of(dtype, op, n));
        auto tensor = here(data_of(comm().rank(), n, dtype, op));
        comm().all_reduce(tensor, op)->wait();
        REQUIRE(tensor.cpu().equal(reference(n, dtype, op, comm().world_size())));
      }
    }
  }
}

TEST_CASE("reduce_scatter: every op of every dtype, in place and not") {
  const int rank = comm().rank();
  const int world_size = comm().world_size();
  for (const auto dtype : kDtypes) {
    for (const auto op : kOps) {
      if (op == ReduceOp::Avg && !at::isFloatingType(dtype)) {
        continue;
      }
      for (const int64_t part : {1, 7, 300}) {
        for (const bool in_place : {false, true}) {
          INFO(name_of(dtype, op, part) << " in place: " << in_place);
          const auto n = part * world_size;
          auto input = here(data_of(rank, n, dtype, op));
          auto output = in_place ? input.slice(0, rank * part, (rank + 1) * part)
                                 : at::zeros({part}, input.options());
          comm().reduce_scatter(output, input, op)->wait();
          const auto expected = reference(n, dtype, op, world_size);
          REQUIRE(output.cpu().equal(expected.slice(0, rank * part, (rank + 1) * part)));
        }
      }
    }
  }
}

TEST_CASE("all_gather: every dtype, in place and not") {
  const int rank = comm().rank();
  const int world_size = comm().world_size();
  for (const auto dtype : kDtypes) {
    for (const int64_t part : {1, 7, 300}) {
      for (const bool in_place : {false, true}) {
        INFO(name_of(dtype, ReduceOp::Sum, part) << " in place: " << in_place);
        auto mine = here(data_of(rank, part, dtype));
        auto output = at::zeros({part * world_size}, mine.options());
        if (in_place) {
          auto own = output.slice(0, rank * part, (rank + 1) * part);
          own.copy_(mine);
          mine = own;
        }
        comm().all_gather(output, mine)->wait();
        for (int peer = 0; peer < world_size; ++peer) {
          REQUIRE(output.slice(0, peer * part, (peer + 1) * part)
                      .cpu()
                      .equal(data_of(peer, part, dtype)));
        }
      }
    }
  }
}

TEST_CASE("broadcast: every dtype from every root") {
  for (const auto dtype : kDtypes) {
    for (int root = 0; root < comm().world_size(); ++root) {
      auto tensor = here(data_of(comm().rank(), 33, dtype));
      comm().broadcast(tensor, root)->wait();
      INFO(c10::toString(dtype) << " from rank " << root);
      REQUIRE(tensor.cpu().equal(data_of(root, 33, dtype)));
    }
  }
}

TEST_CASE("dense strides are reduced in memory order") {
  const int rank = comm().rank();
  auto tensor = here(data_of(rank, 2 * 3 * 4 * 5, at::kFloat).view({2, 3, 4, 5}))
                    .contiguous(at::MemoryFormat::ChannelsLast);
  const auto before = tensor.clone();
  comm().all_reduce(tensor)->wait();
  const float factor = static_cast<float>(comm().world_size() * (comm().world_size() + 1)) / 2 /
                       static_cast<float>(rank + 1);
  CHECK(tensor.is_contiguous(at::MemoryFormat::ChannelsLast));
  CHECK(at::allclose(tensor, before * factor, 0, 1e-4));
}

TEST_CASE("works may be waited for in any order, and twice") {
  constexpr int kNum = 20;
  std::vector<at::Tensor> tensors;
  std::vector<ddp::WorkPtr> works;
  for (int i = 0; i < kNum; ++i) {
    tensors.push_back(here(data_of(comm().rank(), 100 + i, at::kFloat)));
    works.push_back(comm().all_reduce(tensors.back()));
  }
  for (int i = kNum - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i);
    works[at]->wait();
    works[at]->wait_host(std::chrono::milliseconds(30'000));
    CHECK(works[at]->is_completed());
    REQUIRE(tensors[at].cpu().equal(
        reference(100 + i, at::kFloat, ReduceOp::Sum, comm().world_size())));
  }
}

TEST_CASE("many operations of all kinds in flight at once") {
  const int rank = comm().rank();
  const int world_size = comm().world_size();
  struct Item {
    ddp::WorkPtr work;
    at::Tensor result;
    at::Tensor expected;
  };
  std::vector<Item> items;
  for (int i = 0; i < 150; ++i) {
    const int64_t n = 1 + (i * 37) % 500;
    auto tensor = here(data_of(rank, n * world_size, at::kFloat));
    const auto sum = reference(n * world_size, at::kFloat, ReduceOp::Sum, world_size);
    switch (i % 4) {
      case 0:
        items.push_back({comm().all_reduce(tensor), tensor, sum});
        break;
      case 1: {
        auto output = at::zeros({n}, tensor.options());
        items.push_back({comm().reduce_scatter(output, tensor), output,
                         sum.slice(0, rank * n, (rank + 1) * n)});
        break;
      }
      case 2: {
        const int root = i % world_size;
        items.push_back(
            {comm().broadcast(tensor, root), tensor, data_of(root, n * world_size, at::kFloat)});
        break;
      }
      default: {
        auto output = at::zeros({n * world_size}, tensor.options());
        std::vector<at::Tensor> all;
        for (int peer = 0; peer < world_size; ++peer) {
          all.push_back(data_of(peer, n, at::kFloat));
        }
        items.push_back(
            {comm().all_gather(output, here(data_of(rank, n, at::kFloat))), output, at::cat(all)});
      }
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].work->wait();
    INFO("operation " << i);
    REQUIRE(items[i].result.cpu().equal(items[i].expected));
  }
}

TEST_CASE("a result is used right after wait, work before it is seen") {
  auto tensor = here(data_of(comm().rank(), 1 << 16, at::kFloat));
  for (int i = 0; i < 20; ++i) {
    tensor.mul_(0).add_(comm().rank() + 1);  // enqueued before the call: the reduction must see it
    auto work = comm().all_reduce(tensor);
    work->wait();
    auto doubled = tensor * 2;  // enqueued after wait: it must see the sum
    const float sum = static_cast<float>(comm().world_size() * (comm().world_size() + 1));
    REQUIRE(doubled.eq(sum).all().item<bool>());
  }
}

TEST_CASE("tensors are kept until the work ends, though the caller let go") {
  const int64_t n = 1 << 16;
  auto output = at::zeros({n * comm().world_size()}, at::device(comm().device()));
  std::vector<ddp::WorkPtr> works;
  for (int i = 0; i < 8; ++i) {
    works.push_back(comm().all_gather(output, here(data_of(comm().rank(), n, at::kFloat))));
    auto noise = at::full({n}, -1.0F, output.options());  // would take the memory of the input
  }
  for (const auto& work : works) {
    work->wait();
  }
  for (int peer = 0; peer < comm().world_size(); ++peer) {
    CHECK(output.slice(0, peer * n, (peer + 1) * n).cpu().equal(data_of(peer, n, at::kFloat)));
  }
}

TEST_CASE("a reduction ends while the caller computes and never waits") {
  auto tensor = here(data_of(comm().rank(), 1 << 20, at::kFloat));
  auto work = comm().all_reduce(tensor);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int64_t rounds = 0;
  double value = 1.0;
  while (!work->is_completed() && std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 20'000; ++i) {
      value = value * 1.0000001 + 1e-9;
    }
    ++rounds;
  }
  CHECK(work->is_completed());
  CHECK(value > 1.0 - 1e-6);
  if (std::string(comm().backend()) == "mpi") {
    CHECK(rounds > 0);  // it was not carried out inside the call
  }
  work->wait();
  CHECK(tensor.cpu().equal(reference(1 << 20, at::kFloat, ReduceOp::Sum, comm().world_size())));
}

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
  // 50 ms for the first barrier, which the ranks leave one after the other.
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
  first->wait();  // two communicators never have collectives in flight on one GPU at once here
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

TEST_CASE("allocated memory is aligned, reduced and outlives its group") {
  at::Tensor memory;
  {
    auto group = comm().split(0, comm().rank());
    memory = group->allocate(4096);
    CHECK(memory.numel() == 4096);
    CHECK(memory.scalar_type() == at::kByte);
    CHECK(memory.device() == comm().device());
    CHECK(reinterpret_cast<std::uintptr_t>(memory.data_ptr()) % 256 == 0);
    auto floats = memory.view(at::kFloat);
    floats.fill_(static_cast<float>(comm().rank() + 1));
    group->all_reduce(floats)->wait();
  }
  const float sum = static_cast<float>(comm().world_size() * (comm().world_size() + 1)) / 2;
  CHECK(memory.view(at::kFloat).eq(sum).all().item<bool>());
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
  CHECK(contains(settings_error([&] { comm().allocate(-1); }), "num_bytes=-1"));
  if (comm().device().is_cuda()) {
    CHECK(contains(settings_error([&] { comm().all_reduce(at::ones({1})); }), "cpu"));
  } else {
    CHECK(contains(settings_error([&] { comm().all_reduce(at::ones({1}, at::kMeta)); }), "meta"));
  }
  comm().barrier();  // nothing is left over
}
