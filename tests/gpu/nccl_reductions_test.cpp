// SPDX-License-Identifier: Apache-2.0
// Reductions by NCCL: sums and means, alone, in groups and in graphs, and their measured times.
// Data are small integers, so every result is exact.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <set>
#include <sstream>
#include <thread>

#include "comm/job/create_communicator.hpp"
#include "comm/string_collectives.hpp"
#include "comm/tuning/group_choices.hpp"
#include "ddp/core/error.hpp"
#include "gpu/capture.hpp"
#include "gpu/has_ranks.hpp"
#include "ops/shared/multiprocessors.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/multi_rank_main.hpp"

namespace {

using ddp::ReduceOp;
using ddp::test::has_ranks;

ddp::CommunicatorPtr make(const ddp::CommunicatorOptions& options = {}) {
  auto& context = ddp::test::context();
  return ddp::detail::make_nccl_communicator(context.control_plane(), context.device(), options,
                                             nullptr);
}

int world_size() {
  return ddp::test::context().world_size();
}
int rank() {
  return ddp::test::context().rank();
}
void synchronize() {
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

// 1, 2, …, 16, 1, … times rank + 1: sums and means over 4 ranks are exact in bfloat16.
at::Tensor data(int64_t n, at::ScalarType dtype, int of_rank) {
  const auto values = at::remainder(at::arange(n, at::device(ddp::test::context().device())), 16);
  return ((values + 1) * (of_rank + 1)).to(dtype);
}
at::Tensor reduced(int64_t n, at::ScalarType dtype, ReduceOp op) {
  auto sum = at::zeros({n}, at::device(ddp::test::context().device()).dtype(at::kFloat));
  for (int r = 0; r < world_size(); ++r) {
    sum += data(n, at::kFloat, r);
  }
  return (op == ReduceOp::Avg ? sum / world_size() : sum).to(dtype);
}

// Counts how often `body` makes a stream wait for an event, also inside NCCL.
int count_stream_waits(const std::function<void()>& body) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set activities{torch::profiler::impl::ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  body();
  synchronize();
  const auto file = std::filesystem::temp_directory_path() /
                    ("ddp_stream_waits_" + std::to_string(getpid()) + ".json");
  profiler::disableProfiler()->save(file.string());
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  std::filesystem::remove(file);
  const auto trace = text.str();
  int count = 0;
  const std::string name = "\"cudaStreamWaitEvent\"";
  for (auto at = trace.find(name); at != std::string::npos; at = trace.find(name, at + 1)) {
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("sums and means of parts of a tensor") {
  const auto comm = make();
  const auto memory = at::empty({80 << 20}, at::device(comm->device()).dtype(at::kByte));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto typed = memory.view(dtype);
    for (const int64_t n : {int64_t{1}, int64_t{1000}, int64_t{100'000}, typed.numel() - 64}) {
      for (const auto op : {ReduceOp::Sum, ReduceOp::Avg}) {
        auto part = typed.narrow(0, 64, n);
        part.copy_(data(n, dtype, rank()));
        comm->all_reduce(part, op)->wait();
        CHECK(part.equal(reduced(n, dtype, op)));
      }
    }
  }
  auto doubles = memory.view(at::kDouble).narrow(0, 0, 100);
  doubles.copy_(data(100, at::kDouble, rank()));
  comm->all_reduce(doubles)->wait();
  CHECK(doubles.equal(reduced(100, at::kDouble, ReduceOp::Sum)));
}

TEST_CASE("a mean of fp16 values whose sum is infinite") {
  const auto comm = make();
  const auto values = at::full({1 << 19}, 40000, at::device(comm->device()).dtype(at::kHalf));
  comm->all_reduce(values, ReduceOp::Avg)->wait();
  CHECK(values.eq(40000).all().item<bool>());
}

TEST_CASE("a sum and a mean in groups and graphs") {
  const auto comm = make();
  auto memory = at::empty({1 << 20}, at::device(comm->device()).dtype(at::kFloat));
  auto a = memory.narrow(0, 0, 1000);
  auto b = memory.narrow(0, 4096, 300'000);
  const auto a_data = data(1000, at::kFloat, rank());
  const auto b_data = data(300'000, at::kFloat, rank());
  const auto step = [&] {
    a.copy_(a_data);
    b.copy_(b_data);
    ddp::WorkPtr mean;
    ddp::WorkPtr sum;
    {
      const ddp::GroupScope group(*comm);
      mean = comm->all_reduce(a, ReduceOp::Avg);
      sum = comm->all_reduce(b, ReduceOp::Sum);
    }
    mean->wait();
    sum->wait();
  };
  const auto check = [&] {
    synchronize();
    CHECK(a.equal(reduced(1000, at::kFloat, ReduceOp::Avg)));
    CHECK(b.equal(reduced(300'000, at::kFloat, ReduceOp::Sum)));
  };
  step();
  check();
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, step);
  for (int replay = 0; replay < 3; ++replay) {
    memory.zero_();
    synchronize();
    graph.replay();
    check();
  }
}

TEST_CASE("a plan with measured times is adopted by another communicator") {
  if (!has_ranks(2)) {
    return;
  }
  const auto comm = make();
  const auto& rows = comm->choices().all_reduce_table().rows();
  REQUIRE(rows.size() >= 4);
  CHECK(rows.back().us > rows.front().us);
  const auto other = make();
  other->choices().adopt(comm->choices().plan().to_json(), "the test");
  CHECK((other->choices().all_reduce_table().rows() == rows));  // measures nothing
}

// After a capture, NCCL orders all later eager launches of the communicator behind captured ones.
TEST_CASE("a communicator that measured is none that was captured") {
  if (!has_ranks(2)) {
    return;
  }
  const auto waits = [](ddp::Communicator& comm) {
    auto tensor = at::ones({1000}, at::device(comm.device()).dtype(at::kFloat));
    comm.all_reduce(tensor)->wait();  // connects
    synchronize();
    return count_stream_waits([&] {
      for (int i = 0; i < 20; ++i) {
        comm.all_reduce(tensor)->wait();
      }
    });
  };
  const auto fresh = make();
  const auto measured = make();
  REQUIRE_FALSE(measured->choices().all_reduce_table().empty());
  const int expected = waits(*fresh);
  CHECK(expected > 0);
  CHECK(waits(*measured) == expected);
}

TEST_CASE("what measuring takes of the caching allocator goes on with the caller's stream") {
  if (!has_ranks(2)) {
    return;
  }
  namespace allocator = c10::cuda::CUDACachingAllocator;
  const auto device = ddp::test::context().device();
  const auto reserved = [&] {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator::getDeviceStats(device.index()).reserved_bytes[kAll].current;
  };
  synchronize();
  allocator::emptyCache();
  const auto comm = make();
  comm->choices().all_reduce_table();
  const auto after = reserved();
  const auto other = at::empty({int64_t{64} << 20}, at::device(device).dtype(at::kByte));
  CHECK(reserved() == after);
}

TEST_CASE("a measurement whose peers went away ends with the reason of the abort") {
  if (!has_ranks(2)) {
    return;
  }
  const bool peers_split = GENERATE(false, true);
  CAPTURE(peers_split);
  const auto comm = make();
  auto tensor = at::ones({1000}, at::device(comm->device()).dtype(at::kFloat));
  comm->all_reduce(tensor)->wait();
  synchronize();
  if (rank() == 0) {
    auto aborting = std::async(std::launch::async, [&] {
      ddp::test::context().control_plane().barrier();  // the peers have reached their last call
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      comm->abort("rank 1 (node7) failed: out of memory");
    });
    const auto begin = std::chrono::steady_clock::now();
    CHECK_THAT(testing::message_of<ddp::PeerLostError>([&] { comm->choices().all_reduce_table(); }),
               Catch::Contains("rank 1 (node7) failed"));
    aborting.get();
    synchronize();  // the device is idle
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
    ddp::test::context().control_plane().barrier();
  } else {
    // The beginning of all_reduce_table(): rank 0's text, then the communicator that it measures
    // on.
    CHECK(ddp::detail::broadcast_string(*comm, "", 0).empty());
    const auto child = peers_split ? comm->split(0, rank()) : nullptr;
    ddp::test::context().control_plane().barrier();
    ddp::test::context().control_plane().barrier();
    comm->abort("rank 0 was abandoned on purpose");
  }
}

TEST_CASE("communicators reserve multiprocessors while they live, each for itself") {
  const auto of = [](int64_t max_ctas) {
    ddp::CommunicatorOptions options;
    options.nccl_max_ctas = max_ctas;
    return make(options);
  };
  const auto reserved = ddp::ops::reserved_multiprocessors;
  const int before = reserved();
  auto training = of(24);
  CHECK(reserved() == (world_size() > 1 ? 24 : before));
  const auto large = of(32);
  const auto of_nccl = of(0);
  auto few = of(4);
  CHECK(reserved() == (world_size() > 1 ? 24 : before));
  training = nullptr;
  CHECK(reserved() == (world_size() > 1 ? 4 : before));
  few = nullptr;
  CHECK(reserved() == before);
}
