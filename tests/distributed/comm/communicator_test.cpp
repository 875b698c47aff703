// SPDX-License-Identifier: Apache-2.0
// Every operation over the ranks of the job, on the backend of the device (single, mpi, nccl).
#include <ATen/ATen.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "distributed/comm/communicator_test_utils.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

using namespace communicator_tests;

namespace {

const std::vector<ReduceOp> kOps = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max,
                                    ReduceOp::Product};

std::string name_of(at::ScalarType dtype, ReduceOp op, int64_t n) {
  return std::string(ddp::to_string(op)) + " of " + std::to_string(n) + " " + c10::toString(dtype);
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

TEST_CASE("a mean of half types is finite where the sum is not") {
  const int rank = comm().rank();
  const int world_size = comm().world_size();
  // Halves, quarters and their sums are exact in either type.
  const std::vector<std::pair<at::ScalarType, double>> large = {
      {at::kHalf, 40'000.0}, {at::kBFloat16, std::ldexp(1.5, 127)}};
  for (const auto& [dtype, value] : large) {
    INFO(c10::toString(dtype));
    auto reduced = here(at::full({10}, value, dtype));
    comm().all_reduce(reduced, ReduceOp::Avg)->wait();
    CHECK(reduced.cpu().equal(at::full({10}, value, dtype)));
    for (const bool in_place : {false, true}) {
      INFO("in place: " << in_place);
      auto input = here(at::full({10 * world_size}, value, dtype));
      auto output =
          in_place ? input.slice(0, rank * 10, (rank + 1) * 10) : at::zeros({10}, input.options());
      comm().reduce_scatter(output, input, ReduceOp::Avg)->wait();
      CHECK(output.cpu().equal(at::full({10}, value, dtype)));
      CHECK(input.cpu().equal(at::full({10 * world_size}, value, dtype)));  // the rest is unchanged
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
    auto noise = at::full({n}, -1.0F, output.options());  // would reuse the input's memory
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
    CHECK(rounds > 0);  // the call itself did not execute it
  }
  work->wait();
  CHECK(tensor.cpu().equal(reference(1 << 20, at::kFloat, ReduceOp::Sum, comm().world_size())));
}
