// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace {

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ddp::SettingsError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a group of one is the identity") {
  auto comm = ddp::make_single_communicator(at::kCPU);
  CHECK(std::string(comm->backend()) == "single");
  CHECK(comm->rank() == 0);
  CHECK(comm->world_size() == 1);
  auto t = at::arange(6, at::kFloat);
  auto work = comm->all_reduce(t, ddp::ReduceOp::Avg);
  work->wait();
  CHECK(work->is_completed());
  CHECK(t.equal(at::arange(6, at::kFloat)));

  auto out = at::zeros({2, 3}, at::kFloat);
  comm->reduce_scatter(out, t)->wait();
  CHECK(out.view({6}).equal(t));
  auto gathered = at::zeros({6}, at::kFloat);
  comm->all_gather(gathered, t)->wait();
  CHECK(gathered.equal(t));
  comm->all_gather(t, t)->wait_host(std::chrono::milliseconds(10));
  comm->barrier();
}

TEST_CASE("in a group of one each exchange copies the whole tensor, unless it is in place") {
  auto comm = ddp::make_single_communicator(at::kCPU);
  const auto rows = at::arange(6, at::kFloat).view({3, 2});
  auto output = at::zeros({3, 2});
  const auto require_copied = [&](const ddp::WorkPtr& work) {
    work->wait();
    CHECK(output.equal(rows));
    output.zero_();
  };
  require_copied(comm->all_gather(output, rows, {3}));
  require_copied(comm->all_to_all(output, rows));
  require_copied(comm->all_to_all(output, rows, {3}, {3}));
  require_copied(comm->gather(output, rows));
  require_copied(comm->scatter(output, rows));
  auto same = rows.clone();
  comm->all_gather(same, same, {3})->wait();
  comm->reduce(same)->wait();
  CHECK(same.equal(rows));
  comm->all_to_all(at::zeros({0, 2}), at::zeros({0, 2}), {0}, {0})->wait();
}

TEST_CASE("copies keep the memory order, not the index order") {
  auto comm = ddp::make_single_communicator(at::kCPU);
  auto in =
      at::arange(24, at::kFloat).view({1, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  auto out = at::zeros({24}, at::kFloat);
  comm->all_gather(out, in)->wait();
  CHECK(out.equal(in.permute({0, 2, 3, 1}).reshape({24})));
}

TEST_CASE("split and abort of a group of one") {
  auto comm = ddp::make_single_communicator(at::kCPU);
  CHECK(comm->split(-1, 0) == nullptr);
  CHECK(comm->split(3, 0)->world_size() == 1);
  comm->abort("node3 is gone");
  comm->abort("a later reason");
  try {
    comm->all_reduce(at::ones({1}));
    FAIL("an aborted communicator went on");
  } catch (const ddp::PeerLostError& error) {
    CHECK(contains(error.what(), "node3 is gone"));
  }
  CHECK_THROWS_AS(comm->barrier(), ddp::PeerLostError);
}

TEST_CASE("groups of one launch in the order of the communicator they were split from") {
  auto comm = ddp::make_single_communicator(at::kCPU);
  const auto group = comm->split(0, 0);
  CHECK(&group->launch_sequencer() == &comm->launch_sequencer());
  CHECK(&group->split(0, 0)->launch_sequencer() == &comm->launch_sequencer());
  auto other = ddp::make_single_communicator(at::kCPU);
  CHECK(&other->launch_sequencer() != &comm->launch_sequencer());
}

TEST_CASE("argument errors name the operation, the value and what is allowed") {
  auto comm = ddp::make_single_communicator(at::kCPU);
  auto ints = at::ones({4}, at::kInt);
  auto error = [&](auto action) { return message_of(action); };
  CHECK(contains(error([&] { comm->all_reduce(at::Tensor()); }), "undefined"));
  CHECK(contains(error([&] { comm->all_reduce(ints, ddp::ReduceOp::Avg); }), "Int"));
  CHECK(contains(error([&] { comm->all_reduce(at::ones({4, 4}).t().slice(0, 0, 2)); }), "strides"));
  CHECK(contains(error([&] { comm->all_reduce(at::ones({2}, at::kComplexFloat)); }), "dtype"));
  CHECK(contains(error([&] { comm->broadcast(ints, 1); }), "root=1"));
  CHECK(contains(error([&] { comm->broadcast(ints, -1); }), "root=-1"));
  CHECK(contains(error([&] { comm->reduce_scatter(at::ones({3}), at::ones({4})); }), "4 elements"));
  CHECK(contains(error([&] { comm->all_gather(at::ones({4}), ints); }), "dtype"));
  CHECK(contains(error([&] { comm->send(ints, 0); }), "this rank itself"));
  CHECK(contains(error([&] { comm->recv(ints, 2); }), "source=2"));
  auto whole = at::ones({8});
  auto view = whole.slice(0, 2, 6);
  CHECK(contains(error([&] { comm->all_gather(whole.slice(0, 0, 4), view); }), "overlaps"));
}
