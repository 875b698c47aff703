// SPDX-License-Identifier: Apache-2.0
// reduce, gather, scatter, all_to_all and all_gather of unequal parts over the ranks of the job, on
// the backend of the device (single, mpi, nccl).
#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "distributed/comm/communicator_test_utils.hpp"
#include "distributed/comm/row_sizes.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/multi_rank_main.hpp"

using namespace communicator_tests;
using ddp::MismatchError;
using ddp::SettingsError;
using ddp::test::rows_sent;
using ddp::test::Sizes;
using ddp::test::sum_of;
using testing::message_of;

namespace {

int own_rank() {
  return comm().rank();
}
int world() {
  return comm().world_size();
}

Sizes rows_to_all(int sender) {
  Sizes sizes;
  for (int rank = 0; rank < world(); ++rank) {
    sizes.push_back(rows_sent(sender, rank));
  }
  return sizes;
}

Sizes rows_from_all(int receiver) {
  Sizes sizes;
  for (int rank = 0; rank < world(); ++rank) {
    sizes.push_back(rows_sent(rank, receiver));
  }
  return sizes;
}

// Rows of 3 elements; every pair of ranks has its own.
at::Tensor message(int sender, int receiver, int64_t rows, at::ScalarType dtype = at::kFloat) {
  return data_of(sender * 5 + receiver, rows * 3, dtype).view({rows, 3});
}

at::Tensor messages_from(int sender, const Sizes& rows, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parts;
  for (int receiver = 0; receiver < world(); ++receiver) {
    parts.push_back(message(sender, receiver, rows[static_cast<size_t>(receiver)], dtype));
  }
  return at::cat(parts);
}

at::Tensor messages_to(int receiver, const Sizes& rows, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parts;
  for (int sender = 0; sender < world(); ++sender) {
    parts.push_back(message(sender, receiver, rows[static_cast<size_t>(sender)], dtype));
  }
  return at::cat(parts);
}

at::Tensor zeros(std::vector<int64_t> shape, at::ScalarType dtype = at::kFloat) {
  return at::zeros(shape, at::device(comm().device()).dtype(dtype));
}

// All ranks' data_of, in rank order, each as long as its entry of `sizes`.
at::Tensor data_of_all(const Sizes& sizes, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world(); ++rank) {
    parts.push_back(data_of(rank, sizes[static_cast<size_t>(rank)], dtype));
  }
  return at::cat(parts);
}

}  // namespace

TEST_CASE("reduce: every op of every dtype to every root; the others keep their tensors") {
  for (const auto dtype : kDtypes) {
    for (const auto op :
         {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
      if (op == ReduceOp::Avg && !at::isFloatingType(dtype)) {
        continue;
      }
      for (int root = 0; root < world(); ++root) {
        INFO(ddp::to_string(op) << " of " << c10::toString(dtype) << " to rank " << root);
        const auto mine = data_of(own_rank(), 100, dtype, op);
        auto tensor = here(mine);
        comm().reduce(tensor, root, op)->wait();
        REQUIRE(tensor.cpu().equal(own_rank() == root ? reference(100, dtype, op, world()) : mine));
      }
    }
  }
}

TEST_CASE("all_to_all: equal parts of every dtype") {
  for (const auto dtype : kDtypes) {
    for (const int64_t rows : {0, 1, 50}) {
      INFO(rows << " rows of " << c10::toString(dtype));
      const Sizes equal(static_cast<size_t>(world()), rows);
      auto output = zeros({rows * world(), 3}, dtype);
      comm().all_to_all(output, here(messages_from(own_rank(), equal, dtype)))->wait();
      REQUIRE(output.cpu().equal(messages_to(own_rank(), equal, dtype)));
    }
  }
}

TEST_CASE("all_to_all: other numbers of rows for each pair of ranks, some of them 0") {
  const auto sent = rows_to_all(own_rank());
  const auto received = rows_from_all(own_rank());
  for (int round = 0; round < 3; ++round) {
    auto output = zeros({sum_of(received), 3});
    comm().all_to_all(output, here(messages_from(own_rank(), sent)), received, sent)->wait();
    REQUIRE(output.cpu().equal(messages_to(own_rank(), received)));
  }
}

TEST_CASE("gather and scatter: every root, in place and not") {
  for (int root = 0; root < world(); ++root) {
    for (const bool in_place : {false, true}) {
      INFO("root " << root << ", in place: " << in_place);
      const bool is_root = own_rank() == root;
      const Sizes sizes(static_cast<size_t>(world()), 7);
      auto whole = is_root ? zeros({7 * world()}) : at::Tensor();
      auto part = here(data_of(own_rank(), 7, at::kFloat));
      if (is_root && in_place) {
        whole.narrow(0, root * 7, 7).copy_(part);
        part = whole.narrow(0, root * 7, 7);
      }
      comm().gather(whole, part, root)->wait();
      if (is_root) {
        REQUIRE(whole.cpu().equal(data_of_all(sizes)));
        whole.add_(1);
      }
      auto back = is_root && in_place ? part : zeros({7});
      comm().scatter(back, whole, root)->wait();
      REQUIRE(back.cpu().equal(data_of(own_rank(), 7, at::kFloat) + 1));
    }
  }
}

TEST_CASE("all_gather of unequal parts: every dtype, in place and not, one rank without rows") {
  Sizes sizes;
  for (int rank = 0; rank < world(); ++rank) {
    sizes.push_back(rank == 1 ? 0 : 2 + rank);
  }
  int64_t before = 0;
  for (int rank = 0; rank < own_rank(); ++rank) {
    before += sizes[static_cast<size_t>(rank)];
  }
  const auto own = sizes[static_cast<size_t>(own_rank())];
  for (const auto dtype : kDtypes) {
    for (const bool in_place : {false, true}) {
      INFO(c10::toString(dtype) << ", in place: " << in_place);
      auto mine = here(data_of(own_rank(), own, dtype));
      auto output = zeros({sum_of(sizes)}, dtype);
      if (in_place) {
        auto part = output.narrow(0, before, own);
        part.copy_(mine);
        mine = part;
      }
      comm().all_gather(output, mine, sizes)->wait();
      REQUIRE(output.cpu().equal(data_of_all(sizes, dtype)));
    }
  }
}

TEST_CASE("MPI's messages of a program and of an exchange never mix") {
  if (std::string(comm().backend()) != "mpi") {
    return;  // the stream of NCCL runs them one after the other
  }
  const bool sends = own_rank() == 0, receives = own_rank() == 1;
  auto note = here(own_rank() == 0 ? at::full({3}, 42.0F) : at::zeros({3}));
  ddp::WorkPtr work;
  if (receives) {
    work = comm().recv(note, 0);
  }
  // Rank 0 calls it before its send(), so a message of the exchange reaches rank 1 first.
  auto output = zeros({world(), 3});
  const Sizes ones(static_cast<size_t>(world()), 1);
  const auto exchange = comm().all_to_all(output, here(messages_from(own_rank(), ones)));
  if (sends && world() > 1) {
    work = comm().send(note, 1);
  }
  exchange->wait();
  if (work != nullptr) {
    work->wait();
  }
  CHECK(output.cpu().equal(messages_to(own_rank(), ones)));
  if (receives) {
    CHECK(note.cpu().equal(at::full({3}, 42.0F)));
  }
}

TEST_CASE("wrong sizes are refused on their own rank, with the values") {
  const auto refused = [](const auto& call) { return message_of<SettingsError>(call); };
  const auto rows = zeros({3, 2}), other = zeros({3, 2});
  const Sizes three_of_all(static_cast<size_t>(world()), 3);
  const Sizes too_many(static_cast<size_t>(world()) + 1, 0);
  Sizes sum_four(static_cast<size_t>(world()), 0);
  sum_four[0] = 4;
  Sizes negative = sum_four;
  negative.back() -= 5;
  CHECK_THAT(refused([&] { comm().all_gather(rows, other, too_many); }),
             Catch::Contains("all_gather: sizes has " + std::to_string(world() + 1)));
  CHECK_THAT(refused([&] { comm().all_gather(rows, other, sum_four); }),
             Catch::Contains("output has 3 rows, but sizes=[4") && Catch::Contains("the sum 4"));
  CHECK_THAT(refused([&] { comm().all_gather(rows, other, negative); }),
             Catch::Contains("has a negative entry"));
  CHECK_THAT(refused([&] {
               comm().all_gather(zeros({3 * world(), 2}), zeros({4, 2}), three_of_all);
             }),
             Catch::Contains("input has 4 rows, but this rank's entry of sizes=[3"));
  CHECK_THAT(refused([&] {
               comm().all_gather(zeros({3 * world(), 2}), zeros({3, 1}), three_of_all);
             }),
             Catch::Contains("rows of 2 elements, but input of 1"));
  CHECK_THAT(refused([&] { comm().all_to_all(rows, other, three_of_all); }),
             Catch::Contains("fix: give both or none"));
  CHECK_THAT(refused([&] { comm().all_to_all(rows, rows.narrow(0, 0, 2)); }),
             Catch::Contains("input has 4 elements and output 6"));
  const auto whole = zeros({2 * world()});
  CHECK_THAT(refused([&] { comm().all_to_all(whole, whole); }),
             Catch::Contains("output overlaps input"));
  CHECK_THAT(refused([&] { comm().gather(whole, zeros({2}), world()); }),
             Catch::Contains("gather: root=" + std::to_string(world())));
  CHECK_THAT(refused([&] { comm().scatter(zeros({2}), whole, -1); }),
             Catch::Contains("scatter: root=-1"));
  CHECK_THAT(refused([&] { comm().reduce(whole, -1); }), Catch::Contains("reduce: root=-1"));
  CHECK_THAT(refused([&] { comm().gather(zeros({1}), zeros({2}), own_rank()); }),
             Catch::Contains("output has 1 elements"));
}

TEST_CASE("check_collectives names the two ranks whose sizes differ, and nothing was sent") {
  if (world() < 2 || !ddp::test::checks_collectives()) {
    return;
  }
  Sizes sent(static_cast<size_t>(world()), 2), received = sent;
  if (own_rank() == 1) {
    sent[0] = 3;  // rank 0 expects 2
  }
  const auto exchange = [&] {
    comm()
        .all_to_all(zeros({sum_of(received), 3}), zeros({sum_of(sent), 3}), received, sent)
        ->wait();
  };
  CHECK_THAT(message_of<MismatchError>(exchange),
             Catch::Contains("all_to_all (Float, uneven): rank 1 sends 9 elements to rank 0, which "
                             "expects 6"));
  sent[0] = 2;
  exchange();
  const auto gather = [&](int64_t of_last) {
    Sizes sizes(static_cast<size_t>(world()), 1);
    sizes.front() = own_rank() == 0 ? of_last : 1;
    sizes.back() += 1 - (sizes.front() - 1);
    return [sizes] {
      const auto own = sizes[static_cast<size_t>(own_rank())];
      comm().all_gather(zeros({sum_of(sizes)}), zeros({own}), sizes)->wait();
    };
  };
  CHECK_THAT(message_of<MismatchError>(gather(2)),
             Catch::Contains("rank 0 sends 2 elements to rank 1, which expects 1"));
  gather(1)();
}
