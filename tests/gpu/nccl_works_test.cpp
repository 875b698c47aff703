// SPDX-License-Identifier: Apache-2.0
// Works waited for in any order, from any stream or thread, polled, dropped, grouped and captured.
// The launching stream is busy and the reading stream is idle, so a wait that ends too early reads
// old values.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <thread>
#include <vector>

#include "comm/job/create_communicator.hpp"
#include "comm/nccl/nccl_communicator.hpp"
#include "gpu/capture.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

namespace {

using ddp::detail::NcclCommunicator;

ddp::CommunicatorPtr make() {
  auto& context = ddp::test::context();
  return ddp::detail::make_nccl_communicator(context.control_plane(), context.device(), {},
                                             nullptr);
}
void synchronize() {
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}
float rank_plus_one() {
  return static_cast<float>(ddp::test::context().rank() + 1);
}
float sum_of_ranks() {
  const int n = ddp::test::context().world_size();
  return static_cast<float>(n * (n + 1)) / 2;
}
at::TensorOptions on_device() {
  return at::device(ddp::test::context().device()).dtype(at::kFloat);
}

// Consecutive all_reduces, each after some milliseconds of other work.
struct Row {
  Row(ddp::Communicator& comm, int count, int64_t numel = 1000) {
    for (int i = 0; i < count; ++i) {
      tensors.push_back(at::zeros({numel}, on_device()));
    }
    synchronize();  // reading too early gives zeros
    for (const auto& tensor : tensors) {
      keep_busy();
      tensor.fill_(rank_plus_one());
      works.push_back(comm.all_reduce(tensor));
    }
  }
  void keep_busy(int additions = 4) {
    for (int i = 0; i < additions; ++i) {
      busy.add_(1);
    }
  }
  // Waits on the current stream and returns true if the result is complete.
  bool ends(size_t which) {
    works[which]->wait();
    return tensors[which].eq(sum_of_ranks()).all().item<bool>();
  }

  at::Tensor busy = at::zeros({int64_t{1} << 28}, on_device());
  std::vector<at::Tensor> tensors;
  std::vector<ddp::WorkPtr> works;
};

template <typename Body>
void on_idle_stream(const Body& body) {
  const c10::cuda::CUDAStreamGuard guard(
      c10::cuda::getStreamFromPool(false, ddp::test::context().device().index()));
  body();
}

}  // namespace

TEST_CASE("works in a row are waited for out of order, on one stream and on others") {
  auto comm = make();
  for (const std::vector<size_t>& order :
       {std::vector<size_t>{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}}) {
    Row row(*comm, 4);
    on_idle_stream([&] { row.works[order[0]]->wait(); });  // no other stream waits through this
    on_idle_stream([&] {
      for (const auto which : order) {
        CHECK(row.ends(which));
      }
    });
    on_idle_stream([&] { CHECK(row.ends(2)); });
    CHECK(row.ends(0));
  }
}

TEST_CASE("a wait for one work does not wait for the later ones") {
  auto comm = make();
  Row row(*comm, 1);
  row.keep_busy(400);
  auto later = at::full({1000}, rank_plus_one(), on_device());
  const auto later_work = comm->all_reduce(later);
  on_idle_stream([&] {
    CHECK(row.ends(0));
    CHECK_FALSE(later_work->is_completed());
  });
  later_work->wait();
  CHECK(later.eq(sum_of_ranks()).all().item<bool>());
}

TEST_CASE("a stream that waited for a row waits for the launches after it as well") {
  auto comm = make();
  Row row(*comm, 3);
  on_idle_stream([&] {
    row.works[1]->wait();
    // The launching stream is another one, and is busy before the fourth launch too.
    const auto late = at::zeros({1000}, on_device());
    const auto here = c10::cuda::getCurrentCUDAStream();
    synchronize();
    ddp::WorkPtr work;
    {
      const c10::cuda::CUDAStreamGuard guard(
          c10::cuda::getStreamFromPool(true, ddp::test::context().device().index()));
      row.keep_busy();
      late.fill_(rank_plus_one());
      work = comm->all_reduce(late);
    }
    REQUIRE(here == c10::cuda::getCurrentCUDAStream());
    work->wait();
    CHECK(late.eq(sum_of_ranks()).all().item<bool>());
  });
}

TEST_CASE("many works in a row, some waited for in another thread while others are launched") {
  auto comm = make();
  for (int round = 0; round < 3; ++round) {
    Row row(*comm, 5);
    std::vector<ddp::WorkPtr> others;
    auto x = at::ones({16}, on_device());
    bool ended = false;
    std::thread waiter([&, device = ddp::test::context().device()] {
      const c10::cuda::CUDAGuard guard(device);
      on_idle_stream([&] { ended = row.ends(4) && row.ends(1); });
    });
    for (int i = 0; i < 100; ++i) {
      others.push_back(comm->all_reduce(x, ddp::ReduceOp::Max));
    }
    waiter.join();
    CHECK(ended);
    for (const auto& work : others) {
      work->wait();
    }
    CHECK(x.eq(1).all().item<bool>());
  }
}

TEST_CASE("works in a row are asked, waited for by the host, and dropped") {
  auto comm = make();
  Row row(*comm, 4);
  CHECK_FALSE(row.works[3]->is_completed());
  while (!row.works[3]->is_completed()) {
    std::this_thread::yield();
  }
  on_idle_stream([&] { CHECK(row.tensors[3].eq(sum_of_ranks()).all().item<bool>()); });
  CHECK(row.works[0]->is_completed());

  Row next(*comm, 4);
  next.works[0].reset();  // dropped without a wait
  next.works[3].reset();
  next.works[2]->wait_host();
  on_idle_stream([&] {
    CHECK(next.tensors[2].eq(sum_of_ranks()).all().item<bool>());
    CHECK(next.ends(1));
  });
  next.works.clear();
  for (int i = 0; i < 100; ++i) {
    comm->all_reduce(at::ones({4096}, on_device()));  // its memory is freed immediately
  }
  synchronize();
  for (const auto& tensor : next.tensors) {
    CHECK(tensor.eq(sum_of_ranks()).all().item<bool>());
  }
  const auto lanes = dynamic_cast<NcclCommunicator&>(*comm).counters().lanes();
  CHECK(lanes[0].enqueued == 108);
  CHECK(lanes[0].completed == 108);
}

TEST_CASE("small works between large ones, groups, other collectives and captures") {
  auto comm = make();
  auto large = at::zeros({1 << 20}, on_device());  // 4 MiB
  auto captured = at::zeros({100}, on_device());
  Row row(*comm, 3);
  row.keep_busy();
  large.fill_(rank_plus_one());
  auto large_work = comm->all_reduce(large);
  Row second(*comm, 2);
  auto root = at::full({10}, rank_plus_one(), on_device());
  auto broadcast = comm->broadcast(root);
  Row third(*comm, 2);
  ddp::WorkPtr grouped;
  auto in_group = at::full({10}, rank_plus_one(), on_device());
  {
    const ddp::GroupScope group(*comm);
    grouped = comm->all_reduce(in_group);
  }
  Row fourth(*comm, 2);
  // Waits for the fourth row must not enter the graph.
  at::cuda::CUDAGraph graph;
  ddp::test::capture(graph, [&] {
    captured.fill_(rank_plus_one());
    auto work = comm->all_reduce(captured);
    std::thread([&, device = ddp::test::context().device()] {
      const c10::cuda::CUDAGuard guard(device);
      on_idle_stream([&] {
        fourth.works[1]->wait();
        fourth.busy.add_(1);  // not a node of the graph
      });
    }).join();
    work->wait();
  });
  on_idle_stream([&] { CHECK(fourth.ends(0)); });
  Row fifth(*comm, 2);
  graph.replay();
  on_idle_stream([&] {
    CHECK(fifth.ends(1));
    grouped->wait();
    CHECK(in_group.eq(sum_of_ranks()).all().item<bool>());
    CHECK(third.ends(1));
    broadcast->wait();
    CHECK(root.eq(1).all().item<bool>());
    CHECK(second.ends(0));
    large_work->wait();
    CHECK(large.eq(sum_of_ranks()).all().item<bool>());
    CHECK(row.ends(2));
    CHECK(row.ends(0));
  });
  synchronize();
  CHECK(captured.eq(sum_of_ranks()).all().item<bool>());
}

TEST_CASE("a collective that could not be launched is not waited for") {
  auto comm = make();
  auto& counters = dynamic_cast<NcclCommunicator&>(*comm).counters();
  auto x = at::full({16}, rank_plus_one(), on_device());
  comm->all_reduce(x)->wait();
  synchronize();
  auto unusable = at::ones({16}, on_device());
  unusable.storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
  CHECK_THROWS(comm->all_reduce(unusable));
  synchronize();
  CHECK(counters.lanes()[0].enqueued == 1);
  CHECK(counters.lanes()[0].completed == 1);
  comm->all_reduce(x)->wait();
  synchronize();
  CHECK(counters.lanes()[0].enqueued == 2);
  CHECK(counters.lanes()[0].completed == 2);
}
