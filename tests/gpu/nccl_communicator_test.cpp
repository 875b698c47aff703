// SPDX-License-Identifier: Apache-2.0
// Features of the NCCL communicator alone: graph captures, counters, watchdog, abort. Communicators
// that the tests break report their failure to the test, not to the job.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <cuda_runtime_api.h>
#include <torch/torch.h>

#include <atomic>
#include <future>
#include <thread>

#include "comm/job/create_communicator.hpp"
#include "comm/nccl/nccl_communicator.hpp"
#include "ddp/core/error.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/graphed_step.hpp"
#include "gpu/capture.hpp"
#include "gpu/has_ranks.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/multi_rank_main.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::ReduceOp;
using ddp::detail::CollectiveFailure;
using ddp::detail::NcclCommunicator;
using ddp::test::has_ranks;

ddp::CommunicatorPtr make(const ddp::CommunicatorOptions& options = {},
                          ddp::detail::CollectiveFailureHandler on_failure = nullptr) {
  auto& context = ddp::test::context();
  return ddp::detail::make_nccl_communicator(context.control_plane(), context.device(), options,
                                             std::move(on_failure));
}

NcclCommunicator& nccl(const ddp::CommunicatorPtr& comm) {
  return dynamic_cast<NcclCommunicator&>(*comm);
}

void synchronize() {
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

// A host barrier of the test, independent of broken communicators.
void meet() {
  ddp::test::context().control_plane().barrier();
}

int world_size() {
  return ddp::test::context().world_size();
}
int rank() {
  return ddp::test::context().rank();
}
float sum_of_ranks() {
  return static_cast<float>(world_size() * (world_size() + 1)) / 2;
}

at::TensorOptions on_device() {
  return at::device(ddp::test::context().device()).dtype(at::kFloat);
}

}  // namespace

TEST_CASE("a captured all_reduce gives the same result in every replay") {
  auto comm = make();
  auto x = at::zeros({1000}, on_device());
  auto y = at::zeros_like(x);
  auto warm = at::ones({1000}, on_device());
  comm->all_reduce(warm)->wait();
  synchronize();
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] {
    x.fill_(static_cast<float>(rank() + 1));
    auto work = comm->all_reduce(x);
    work->wait();
    y.add_(x);
  });
  for (int replay = 1; replay <= 5; ++replay) {
    graph.replay();
    synchronize();
    REQUIRE(y.eq(sum_of_ranks() * static_cast<float>(replay)).all().item<bool>());
  }
  auto eager = at::full({10}, static_cast<float>(rank() + 1), on_device());
  comm->all_reduce(eager)->wait();  // eager work after replays, on the same communicator
  CHECK(eager.eq(sum_of_ranks()).all().item<bool>());
}

TEST_CASE("several captured collectives, in a group and of several kinds") {
  auto comm = make();
  const int n = world_size();
  auto a = at::zeros({64}, on_device());
  auto b = at::zeros({64 * n}, on_device());
  auto part = at::zeros({64}, on_device());
  auto shorts = at::zeros({32}, on_device().dtype(at::kShort));
  const auto step = [&] {
    a.fill_(static_cast<float>(rank() + 1));
    b.fill_(static_cast<float>(rank() + 1));
    shorts.fill_(rank() + 1);
    std::vector<ddp::WorkPtr> works;
    {
      const ddp::GroupScope group(*comm);
      works.push_back(comm->all_reduce(a, ReduceOp::Max));
      works.push_back(comm->reduce_scatter(part, b));
    }
    works.push_back(comm->all_reduce(shorts));
    for (auto work = works.rbegin(); work != works.rend(); ++work) {
      (*work)->wait();  // in another order
    }
  };
  step();
  synchronize();
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, step);
  for (int replay = 0; replay < 3; ++replay) {
    a.zero_();
    part.zero_();
    shorts.zero_();
    synchronize();
    graph.replay();
    synchronize();
    REQUIRE(a.eq(static_cast<float>(n)).all().item<bool>());
    REQUIRE(part.eq(sum_of_ranks()).all().item<bool>());
    REQUIRE(shorts.eq(static_cast<int>(sum_of_ranks())).all().item<bool>());
  }
}

TEST_CASE("the host cannot wait for a captured work, and is told so") {
  auto comm = make();
  auto x = at::ones({8}, on_device());
  comm->all_reduce(x)->wait();
  synchronize();
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] {
    auto work = comm->all_reduce(x);
    CHECK_FALSE(work->is_completed());
    CHECK_THROWS_AS(work->wait_host(10ms), ddp::SettingsError);
    work->wait();
  });
}

// A rank that replays would not take part in the comparisons of one that runs eagerly.
TEST_CASE("a step is not captured while calls are compared") {
  auto& context = ddp::test::context();
  torch::nn::Linear module(4, 4);
  module->to(context.device());
  ddp::DistributedDataParallel model(module, context.communicator());
  ddp::GraphedStep step(context, {.models = {&model}},
                        [&](const at::Tensor& batch, const ddp::StepScalars&) {
                          model.zero_grad();
                          auto loss = model.forward(batch).sum();
                          loss.backward();
                          return loss.detach();
                        });
  for (int i = 0; i < 6; ++i) {
    step(at::ones({2, 4}, context.device()), {.step = i});
  }
  const bool compares = context.world_size() > 1;
  CHECK((step.counts().replayed > 0) == !compares);
  CHECK((step.counts().why_eager.find("check_collectives") != std::string::npos) == compares);
}

TEST_CASE("counters advance eagerly and in replays") {
  auto comm = make();
  auto x = at::ones({1000}, on_device());
  for (int i = 0; i < 7; ++i) {
    comm->all_reduce(x)->wait();
  }
  {
    const ddp::GroupScope group(*comm);
    comm->all_reduce(x);
    comm->broadcast(x);
  }
  synchronize();
  auto lanes = nccl(comm).counters().lanes();
  REQUIRE(lanes.size() == 1);
  CHECK(lanes[0].enqueued == 9);
  CHECK(lanes[0].completed == 9);

  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] {
    comm->all_reduce(x)->wait();
    comm->all_reduce(x)->wait();
    comm->broadcast(x)->wait();
  });
  lanes = nccl(comm).counters().lanes();
  REQUIRE(lanes.size() == 2);
  CHECK(lanes[1].enqueued == 0);  // captured, not run
  for (uint64_t replay = 1; replay <= 4; ++replay) {
    graph.replay();
    synchronize();
    lanes = nccl(comm).counters().lanes();
    REQUIRE(lanes[1].enqueued == 3 * replay);
    REQUIRE(lanes[1].completed == 3 * replay);
  }
  CHECK(lanes[0].completed == 9);
}

TEST_CASE("collectives in a row share a mark, and none of them is lost") {
  const bool is_held = GENERATE(false, true);
  auto comm = make();
  auto x = at::ones({16}, on_device());
  comm->all_reduce(x)->wait();
  synchronize();
  std::vector<ddp::WorkPtr> works;
  for (int i = 0; i < 50; ++i) {
    works.push_back(comm->all_reduce(x));
  }
  synchronize();
  auto lanes = nccl(comm).counters().lanes();
  CHECK(lanes[0].enqueued <= 51);  // some of the 50 may have no mark yet, and do not count
  CHECK(lanes[0].completed == lanes[0].enqueued);
  works[10]->wait();  // marks all earlier launches
  synchronize();
  lanes = nccl(comm).counters().lanes();
  CHECK(lanes[0].enqueued == 51);
  CHECK(lanes[0].completed == 51);

  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] {
    if (is_held) {
      nccl(comm).hold_counts();
    }
    works.clear();
    for (int i = 0; i < 5; ++i) {
      works.push_back(comm->all_reduce(x));
    }
    for (const auto& work : works) {
      work->wait();
    }
    nccl(comm).join_counts();
  });
  for (uint64_t replay = 1; replay <= 3; ++replay) {
    graph.replay();
    synchronize();
    lanes = nccl(comm).counters().lanes();
    REQUIRE(lanes[1].enqueued == 5 * replay);
    REQUIRE(lanes[1].completed == 5 * replay);
  }
  comm->all_reduce(x);
  synchronize();
  lanes = nccl(comm).counters().lanes();
  CHECK(lanes[0].enqueued == 52);
  CHECK(lanes[0].completed == 52);
}

TEST_CASE("a thread that made no CUDA call yet may wait, and a capture may follow unmarked works") {
  auto comm = make();
  auto x = at::ones({16}, on_device());
  std::vector<ddp::WorkPtr> works;
  for (int i = 0; i < 3; ++i) {
    works.push_back(comm->all_reduce(x));  // later ones have no mark yet
  }
  std::thread([work = works[1]] { work->wait_host(); }).join();
  std::thread([work = std::move(works[0])]() mutable { work.reset(); }).join();
  works.push_back(comm->all_reduce(x));
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] { comm->all_reduce(x)->wait(); });
  graph.replay();
  works.clear();
  synchronize();
  const auto lanes = nccl(comm).counters().lanes();
  CHECK(lanes[0].enqueued == 4);
  CHECK(lanes[0].completed + lanes[1].completed == 5);
}

TEST_CASE("a collective waits for what its stream was given before") {
  auto comm = make();
  auto x = at::empty({1 << 24}, on_device());
  auto y = at::empty_like(x);
  for (int round = 0; round < 20; ++round) {
    y.fill_(static_cast<float>(rank() + round));
    for (int i = 0; i < 10; ++i) {
      x.copy_(y);  // keeps the stream busy past the next launch
    }
    if (round % 4 == 3) {
      synchronize();
    }
    comm->all_reduce(x)->wait();
    const float expected = sum_of_ranks() + static_cast<float>(world_size() * (round - 1));
    REQUIRE(x.eq(expected).all().item<bool>());
  }
}

TEST_CASE("works that nobody waits for keep their memory safe") {
  auto comm = make();
  std::vector<at::Tensor> results;
  for (int i = 0; i < 20; ++i) {
    auto output = at::zeros({1 << 16}, on_device());
    auto input = at::full({(1 << 16) / world_size()}, static_cast<float>(rank() + 1), on_device());
    if (input.numel() * world_size() != output.numel()) {
      return;
    }
    comm->all_gather(output, input);  // work dropped at once; `input` is freed after the round
    results.push_back(output);
  }
  synchronize();
  for (const auto& result : results) {
    CHECK(result.view({world_size(), -1}).select(1, 0).sum().item<float>() == sum_of_ranks());
  }
}

TEST_CASE("abort unblocks the host and the device") {
  if (!has_ranks(2)) {
    return;
  }
  auto comm = make();
  auto warm = at::ones({4}, on_device());
  comm->all_reduce(warm)->wait();
  synchronize();
  if (rank() == 0) {
    auto x = at::ones({1000}, on_device());
    auto work = comm->all_reduce(x);  // no other rank joins
    auto aborting = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(300ms);
      comm->abort("rank 1 (node7) failed: out of memory");
    });
    const auto begin = std::chrono::steady_clock::now();
    try {
      work->wait_host();
      FAIL("a collective without its peers ended");
    } catch (const ddp::PeerLostError& error) {
      CHECK(std::string(error.what()).find("rank 1 (node7) failed") != std::string::npos);
    }
    aborting.get();
    synchronize();  // waits until the kernel has ended
    CHECK(std::chrono::steady_clock::now() - begin < 15s);
    CHECK_THROWS_AS(comm->barrier(), ddp::PeerLostError);
  } else {
    std::this_thread::sleep_for(1s);
    comm->abort("rank 0 was abandoned on purpose");
  }
  meet();
}

TEST_CASE("calls around a capture are compared, those inside are not") {
  if (!has_ranks(2) || !ddp::test::checks_collectives()) {
    return;
  }
  auto& comm = *ddp::test::context().communicator();
  auto x = at::ones({8}, on_device());
  comm.all_reduce(x)->wait();
  synchronize();
  at::cuda::CUDAGraph graph;
  std::this_thread::sleep_for(rank() == 0 ? 0ms : 200ms);
  const auto begin = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration captured_in{};
  ddp::test::capture(graph, [&] {
    x.fill_(static_cast<float>(rank() + 1));
    comm.all_reduce(x)->wait();
    captured_in = std::chrono::steady_clock::now() - begin;
  });
  CHECK((rank() != 0 || captured_in < 150ms));  // did not wait for other ranks
  for (int replay = 0; replay < 3; ++replay) {
    graph.replay();
    synchronize();
    REQUIRE(x.eq(sum_of_ranks()).all().item<bool>());
  }
  const auto op = rank() == 1 ? ReduceOp::Max : ReduceOp::Sum;
  const auto message = testing::message_of<ddp::MismatchError>([&] { comm.all_reduce(x, op); });
  CHECK_THAT(message, Catch::Contains("rank 0 called all_reduce (sum of 8 Float), rank 1 called "
                                      "all_reduce (max of 8 Float)"));
  comm.all_reduce(x)->wait();
  synchronize();
}

TEST_CASE("the watchdog names the collective that stands, and ends it") {
  if (!has_ranks(2)) {
    return;
  }
  std::promise<CollectiveFailure> told;
  ddp::CommunicatorOptions options;
  options.timeout = 500ms;
  options.first_step_timeout = 60s;
  auto comm = make(options, [&](const CollectiveFailure& failure) { told.set_value(failure); });
  auto x = at::ones({1000}, on_device());
  comm->all_reduce(x)->wait();
  synchronize();
  comm->set_step(5);
  std::this_thread::sleep_for(1s);  // idle time is not a stall
  if (rank() == 0) {
    auto work = comm->all_reduce(x);
    auto future = told.get_future();
    REQUIRE(future.wait_for(20s) == std::future_status::ready);
    const auto failure = future.get();
    CHECK(failure.collective.find("all_reduce #2 (1000 Float, 4000 bytes)") != std::string::npos);
    CHECK(failure.collective.find("completed 1 of 2") != std::string::npos);
    CHECK(failure.step == 5);
    CHECK_THROWS_AS(work->wait_host(10s), ddp::PeerLostError);
    CHECK_THROWS_AS(work->wait(), ddp::PeerLostError);
    synchronize();
  }
  meet();
  comm->abort("the test is over");
}

TEST_CASE("the watchdog sees a replay that stands") {  // last: it breaks a graph's communicator
  if (!has_ranks(2)) {
    return;
  }
  std::promise<CollectiveFailure> told;
  ddp::CommunicatorOptions options;
  options.timeout = 500ms;
  options.first_step_timeout = 500ms;
  auto comm = make(options, [&](const CollectiveFailure& failure) { told.set_value(failure); });
  auto x = at::ones({1000}, on_device());
  comm->all_reduce(x)->wait();
  synchronize();
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] {
    auto first = comm->broadcast(x);
    auto second = comm->all_reduce(x);
    first->wait();
    second->wait();
  });
  graph.replay();
  synchronize();
  meet();
  if (rank() == 0) {
    graph.replay();  // no other rank does
    auto future = told.get_future();
    REQUIRE(future.wait_for(20s) == std::future_status::ready);
    const auto failure = future.get();
    CHECK(failure.collective.find("captured in a CUDA graph") != std::string::npos);
    CHECK(failure.collective.starts_with("one of broadcast #2 "));
    CHECK(failure.collective.find(" to all_reduce #3 ") != std::string::npos);
    CHECK(failure.collective.find("collective 1 to 2 of 2 captured") != std::string::npos);
    synchronize();
  }
  meet();
  graph.reset();
  comm->abort("the test is over");
}
