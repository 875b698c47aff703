// SPDX-License-Identifier: Apache-2.0
// all_reduce through the communicator against NCCL's own loop: same buffer, same launch mode,
// paired rounds. One process a GPU:
//
//   NCCL_NVLS_ENABLE=0 torchrun --no-python --nproc-per-node 4 bench_all_reduce [bytes [rounds]]
//
// `bytes` is the largest buffer's size (1 GiB). A round times both loops one after the other, order
// swapped each time; the figures are medians over the rounds, of the slowest rank. algbw = bytes /
// time, busbw = algbw * 2 (n-1) / n, in GB/s (10^9).
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"

namespace {

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
  }
}
void check(ncclResult_t code, const char* what) {
  if (code != ncclSuccess) {
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(code));
  }
}

// What is compared against: NCCL alone, on a high-priority stream as the communicator has.
class PlainNccl {
 public:
  explicit PlainNccl(ddp::Context& context)
      : stream_(c10::cuda::getStreamFromPool(true, context.device().index())) {
    ncclUniqueId id{};
    if (context.rank() == 0) {
      check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    }
    const auto bytes =
        context.control_plane().broadcast(std::string(id.internal, sizeof(id.internal)));
    std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
    check(ncclCommInitRank(&comm_, context.world_size(), id, context.rank()), "ncclCommInitRank");
  }
  PlainNccl(const PlainNccl&) = delete;
  PlainNccl& operator=(const PlainNccl&) = delete;
  ~PlainNccl() { ncclCommDestroy(comm_); }

  c10::cuda::CUDAStream stream() const { return stream_; }
  void all_reduce(const at::Tensor& tensor) {
    check(ncclAllReduce(tensor.data_ptr(), tensor.data_ptr(), static_cast<size_t>(tensor.numel()),
                        ncclFloat32, ncclSum, comm_, stream_.stream()),
          "ncclAllReduce");
  }

 private:
  c10::cuda::CUDAStream stream_;
  ncclComm_t comm_ = nullptr;
};

using Loop = std::function<void()>;

// Microseconds of one all_reduce, on this rank.
double time_loop(const Loop& loop, int iterations) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto stream = c10::cuda::getCurrentCUDAStream();
  check(cudaEventRecord(begin, stream.stream()), "cudaEventRecord");
  loop();
  check(cudaEventRecord(end, stream.stream()), "cudaEventRecord");
  check(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return static_cast<double>(ms) * 1e3 / iterations;
}

double slowest_rank(ddp::Context& context, double value) {
  double worst = 0;
  for (const auto& text : context.control_plane().all_gather(std::to_string(value))) {
    worst = std::max(worst, std::stod(text));
  }
  return worst;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The stream of `nccl` waits for the caller's, and the caller's for it: what every user must do
// once.
Loop plain_loop(PlainNccl& nccl, const at::Tensor& tensor, int iterations) {
  return [&nccl, tensor, iterations] {
    const auto current = c10::cuda::getCurrentCUDAStream();
    cudaEvent_t edge = nullptr;
    check(cudaEventCreateWithFlags(&edge, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    check(cudaEventRecord(edge, current.stream()), "cudaEventRecord");
    check(cudaStreamWaitEvent(nccl.stream().stream(), edge, 0), "cudaStreamWaitEvent");
    for (int i = 0; i < iterations; ++i) {
      nccl.all_reduce(tensor);
    }
    check(cudaEventRecord(edge, nccl.stream().stream()), "cudaEventRecord");
    check(cudaStreamWaitEvent(current.stream(), edge, 0), "cudaStreamWaitEvent");
    check(cudaEventDestroy(edge), "cudaEventDestroy");
  };
}

// As the reducer does: launched one after the other, waited for at the end.
Loop communicator_loop(ddp::Communicator& comm, const at::Tensor& tensor, int iterations) {
  return [&comm, tensor, iterations] {
    std::vector<ddp::WorkPtr> works;
    works.reserve(static_cast<size_t>(iterations));
    for (int i = 0; i < iterations; ++i) {
      works.push_back(comm.all_reduce(tensor));
    }
    for (const auto& work : works) {
      work->wait();
    }
  };
}

struct Captured {
  at::cuda::CUDAGraph graph;
  explicit Captured(const Loop& loop) {
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    loop();
    graph.capture_end();
  }
};

void measure(ddp::Context& context, PlainNccl& nccl, int64_t num_bytes, bool captured, int rounds) {
  auto& comm = *context.communicator();
  const int iterations = num_bytes <= (1 << 20) ? 100 : num_bytes <= (64 << 20) ? 20 : 5;
  auto tensor = comm.allocate(num_bytes).view(at::kFloat);
  tensor.zero_();
  Loop plain = plain_loop(nccl, tensor, iterations);
  Loop ours = communicator_loop(comm, tensor, iterations);
  plain();
  ours();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::unique_ptr<Captured> plain_graph;
  std::unique_ptr<Captured> our_graph;
  if (captured) {
    plain_graph = std::make_unique<Captured>(plain);
    our_graph = std::make_unique<Captured>(ours);
    plain = [&] { plain_graph->graph.replay(); };
    ours = [&] { our_graph->graph.replay(); };
  }
  std::vector<double> plain_us;
  std::vector<double> our_us;
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    double us[2];
    for (int turn = 0; turn < 2; ++turn) {
      const int which = (turn + round) & 1;
      comm.barrier();
      us[which] = slowest_rank(context, time_loop(which == 0 ? plain : ours, iterations));
    }
    if (round >= 0) {
      plain_us.push_back(us[0]);
      our_us.push_back(us[1]);
    }
  }
  if (context.is_main()) {
    const double theirs = median(plain_us);
    const double mine = median(our_us);
    const double factor = 2.0 * (context.world_size() - 1) / context.world_size();
    const auto algbw = [&](double us) { return static_cast<double>(num_bytes) / us / 1e3; };
    std::printf("%-6s %12lld %10.2f %10.2f %9.2f %9.2f %9.2f %9.2f %8.4f %8.2f\n",
                captured ? "graph" : "eager", static_cast<long long>(num_bytes), theirs, mine,
                algbw(theirs), algbw(mine), algbw(theirs) * factor, algbw(mine) * factor,
                theirs / mine, mine - theirs);
    std::fflush(stdout);
  }
}

void run(int64_t max_bytes, int rounds) {
  ddp::ContextOptions options;
  options.device = "cuda";
  auto context = ddp::Context::create(options);
  if (std::string(context.communicator()->backend()) != "nccl") {
    throw ddp::SettingsError("bench_all_reduce needs at least two ranks with a GPU each");
  }
  {
    PlainNccl nccl(context);
    if (context.is_main()) {
      const char* nvls = std::getenv("NCCL_NVLS_ENABLE");
      std::printf(
          "# %d ranks, float32 sum in place, NCCL_NVLS_ENABLE=%s, median of %d paired rounds\n",
          context.world_size(), nvls == nullptr ? "unset" : nvls, rounds);
      std::printf("%-6s %12s %10s %10s %9s %9s %9s %9s %8s %8s\n", "mode", "bytes", "nccl_us",
                  "ddp_us", "nccl_alg", "ddp_alg", "nccl_bus", "ddp_bus", "ratio", "extra_us");
    }
    for (const bool captured : {false, true}) {
      for (int64_t bytes = 4096; bytes <= max_bytes; bytes *= 4) {
        measure(context, nccl, bytes, captured, rounds);
      }
    }
  }
  context.close();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 30, argc > 2 ? std::atoi(argv[2]) : 21);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_all_reduce: %s\n", error.what());
    return 1;
  }
}
