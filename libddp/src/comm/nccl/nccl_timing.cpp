// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_timing.hpp"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "comm/cuda_check.hpp"

namespace ddp::detail {
namespace {

constexpr int64_t kLargestMeasured = int64_t{64} << 20;  // times grow linearly beyond it
constexpr int kRunsPerGraph = 5;

// The resources of a graph and its timing, released even after exceptions.
struct TimedGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;

  TimedGraph() = default;
  TimedGraph(const TimedGraph&) = delete;
  TimedGraph& operator=(const TimedGraph&) = delete;
  ~TimedGraph() {
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }

  template <typename Body>
  void capture(cudaStream_t stream, const Body& body) {
    check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end), "cudaEventCreate");
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  }

  double run_us(cudaStream_t stream) const {
    check_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
    check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return static_cast<double>(ms) * 1e3;
  }
};

// Times a graph: most steps run in one, and slow host launches would hide device time.
double time_us(NcclLauncher& launcher, NcclReductions& reductions, const at::Tensor& tensor) {
  const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
  const int calls = num_bytes <= (1 << 20) ? 50 : num_bytes <= (16 << 20) ? 20 : 5;
  const auto stream = launcher.stream().stream();
  reductions.enqueue_all_reduce(tensor, ReduceOp::Sum);  // connects the ranks
  TimedGraph timed;
  timed.capture(stream, [&] {
    for (int i = 0; i < calls; ++i) {
      reductions.enqueue_all_reduce(tensor, ReduceOp::Sum);
    }
  });
  timed.run_us(stream);
  double best = timed.run_us(stream);
  for (int run = 1; run < kRunsPerGraph; ++run) {
    best = std::min(best, timed.run_us(stream));
  }
  return best / calls;
}

}  // namespace

std::vector<AllReduceRow> time_all_reduce(Communicator& communicator, NcclLauncher& launcher,
                                          NcclReductions& reductions) {
  const auto lock = launcher.lock();
  const c10::cuda::CUDAGuard guard(communicator.device());
  // Allocated on the caller's stream, which continues to use the allocator's cached memory.
  const auto floats = at::zeros({kLargestMeasured / static_cast<int64_t>(sizeof(float))},
                                at::device(communicator.device()).dtype(at::kFloat));
  floats.record_stream(launcher.stream().unwrap());  // after an abort NCCL may still use it
  const c10::cuda::CUDAStreamGuard stream_guard(launcher.stream());
  // Without this, pending work of this rank or a slower one would be timed too.
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  communicator.barrier();
  std::vector<AllReduceRow> rows;
  for (int64_t num_bytes = 4096; num_bytes <= kLargestMeasured; num_bytes *= 4) {
    const auto part = floats.narrow(0, 0, num_bytes / static_cast<int64_t>(sizeof(float)));
    rows.push_back({num_bytes, time_us(launcher, reductions, part)});
  }
  return rows;
}

}  // namespace ddp::detail
