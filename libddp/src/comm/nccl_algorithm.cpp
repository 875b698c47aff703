// SPDX-License-Identifier: Apache-2.0
// Chooses the all-reduce algorithm and measures each one's time.
//
// NCCL uses its symmetric kernels exactly for sums of floats inside a registered window. A mean, or
// a sum written as "multiply by 1, then sum", uses the ring. So one communicator offers both:
// symmetric kernels with few thread blocks, the ring with many.
#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "comm/cuda_device.hpp"
#include "comm/nccl_communicator_impl.hpp"
#include "comm/nccl_types.hpp"
#include "comm/scale_kernel.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr int64_t kLargestMeasured = int64_t{64} << 20;  // times grow linearly beyond it
constexpr int kTimedRuns = 5;
constexpr size_t kLargestSharingEnd = (size_t{4} << 20) - 1;  // larger ones take longer than a wait

// Time of the kernel that turns a sum into a mean: its launch, then a read and a write.
double scale_us(size_t num_bytes) {
  constexpr double kLaunchUs = 2;
  constexpr double kBytesPerUs = 4.3e6;
  return kLaunchUs + 2 * static_cast<double>(num_bytes) / kBytesPerUs;
}

bool has_float_sum(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kHalf || dtype == c10::kBFloat16;
}

// NCCL's own mean divides before it adds. With symmetric kernels the sum is divided, and fp16
// values with a finite mean may sum to infinity.
bool has_symmetric_kernel(c10::ScalarType dtype, ReduceOp op) {
  return op == ReduceOp::Sum || dtype != c10::kHalf;
}

// Resources of a graph and its timing, released even on exceptions.
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

}  // namespace

AllReduceAlgorithm NcclCommunicator::choose_algorithm(const at::Tensor& tensor, ReduceOp op,
                                                      bool overlapped) const {
  if (options_.nccl_algorithm == "symmetric") {
    return AllReduceAlgorithm::Symmetric;
  }
  return known_table().choose(static_cast<int64_t>(tensor.nbytes()), overlapped,
                              op == ReduceOp::Avg ? scale_us(tensor.nbytes()) : 0);
}

void NcclCommunicator::measure_when_due() {
  if (!memory_ || options_.nccl_algorithm != "auto" || !known_table().empty() || group_depth_ > 0) {
    return;
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device_).stream(), &status),
             "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) {
    all_reduce_table();
  }
}

// "Multiply by 1, then sum": exact, and not supported by the symmetric kernels.
ncclRedOp_t NcclCommunicator::ring_sum(ncclDataType_t dtype) {
  const auto found = ring_sums_.find(dtype);
  if (found != ring_sums_.end()) {
    return found->second;
  }
  float one = 1;
  uint16_t half_one = dtype == ncclFloat16 ? 0x3c00 : 0x3f80;
  void* scalar = dtype == ncclFloat32 ? static_cast<void*>(&one) : &half_one;
  ncclRedOp_t made{};
  check_nccl(ncclRedOpCreatePreMulSum(&made, scalar, dtype, ncclScalarHostImmediate, comm_), comm_,
             "ncclRedOpCreatePreMulSum");
  return ring_sums_[dtype] = made;  // destroyed with the communicator
}

WorkPtr NcclCommunicator::reduce_in_place(const at::Tensor& tensor, ReduceOp op, bool overlapped) {
  check_all_reduce(info(), tensor, op);
  compare("all_reduce", tensor, op);
  if (tensor.scalar_type() == at::kShort) {
    return reduce_int16("all_reduce", tensor, tensor, op);
  }
  const std::lock_guard lock(mutex_);
  check_usable("all_reduce");
  const auto dtype = to_nccl(tensor.scalar_type());
  const bool in_window = memory_ && (op == ReduceOp::Sum || op == ReduceOp::Avg) &&
                         has_float_sum(tensor.scalar_type()) &&
                         memory_->contains(tensor.const_data_ptr(), tensor.nbytes());
  const bool symmetric = in_window && has_symmetric_kernel(tensor.scalar_type(), op) &&
                         choose_algorithm(tensor, op, overlapped) == AllReduceAlgorithm::Symmetric;
  auto nccl_op = to_nccl(op, tensor.scalar_type());
  std::function<void()> after;
  if (symmetric && op == ReduceOp::Avg) {
    nccl_op = ncclSum;
    const auto scaled = dtype == ncclFloat32 ? ScaleDtype::Float : ScaleDtype::BFloat16;
    after = [tensor, scaled, factor = 1.0F / static_cast<float>(world_size_), stream = stream_] {
      check_cuda(launch_scale(tensor.data_ptr(), tensor.numel(), scaled, factor, stream.stream()),
                 "launch_scale");
    };
  } else if (!symmetric && in_window && op == ReduceOp::Sum) {
    nccl_op = ring_sum(dtype);
  }
  const bool shares_end =
      !overlapped && !after && group_depth_ == 0 && tensor.nbytes() <= kLargestSharingEnd;
  return launch_locked(
      "all_reduce", tensor, {tensor},
      [&](ncclComm_t comm, cudaStream_t stream) {
        void* data = tensor.data_ptr();
        return ncclAllReduce(data, data, static_cast<size_t>(tensor.numel()), dtype, nccl_op, comm,
                             stream);
      },
      std::move(after), shares_end);
}

Plan::Identity NcclCommunicator::plan_identity() const {
  int nccl = 0;
  check_nccl(ncclGetVersion(&nccl), nullptr, "ncclGetVersion");
  auto identity = kernels_identity(device());
  identity["nccl"] = std::to_string(nccl);
  identity["windows"] = memory_ ? "yes" : "no";
  identity["nccl_ctas"] = concat(options_.nccl_min_ctas, "-", options_.nccl_max_ctas);
  return identity;
}

// Times a graph, because most steps run in one and slow host launches would hide device time.
double NcclCommunicator::time_all_reduce(float* data, int64_t num_bytes,
                                         AllReduceAlgorithm algorithm, bool in_window) {
  const int calls = num_bytes <= (1 << 20) ? 50 : num_bytes <= (16 << 20) ? 20 : 5;
  const auto op =
      in_window && algorithm == AllReduceAlgorithm::Ring ? ring_sum(ncclFloat32) : ncclSum;
  const auto call = [&] {
    enqueue("all_reduce", [&](ncclComm_t comm, cudaStream_t stream) {
      return ncclAllReduce(data, data, static_cast<size_t>(num_bytes) / sizeof(float), ncclFloat32,
                           op, comm, stream);
    });
  };
  call();  // connects the ranks
  TimedGraph timed;
  timed.capture(stream_.stream(), [&] {
    for (int i = 0; i < calls; ++i) {
      call();
    }
  });
  timed.run_us(stream_.stream());
  double best = timed.run_us(stream_.stream());
  for (int run = 1; run < kTimedRuns; ++run) {
    best = std::min(best, timed.run_us(stream_.stream()));
  }
  return best / calls;
}

// Uses its own communicator: once a communicator was captured, NCCL orders its eager launches
// behind its captured ones. This costs small ones 1 us each.
std::vector<AllReduceRow> NcclCommunicator::measure_all_reduce() {
  const auto measured = split(/*color=*/0, /*key=*/rank_);
  return static_cast<NcclCommunicator&>(*measured).time_all_sizes();
}

std::vector<AllReduceRow> NcclCommunicator::time_all_sizes() {
  const std::lock_guard lock(mutex_);
  const c10::cuda::CUDAGuard guard(device_);
  // Allocated on the caller's stream, which continues to use the allocator's cached memory.
  const auto memory = memory_
                          ? memory_->allocate(kLargestMeasured)
                          : at::empty({kLargestMeasured}, at::device(device()).dtype(at::kByte));
  memory.record_stream(stream_.unwrap());  // after an abort NCCL may still use it
  auto floats = memory.view(at::kFloat).zero_();
  auto* data = floats.mutable_data_ptr<float>();
  const c10::cuda::CUDAStreamGuard stream_guard(stream_);
  // Otherwise pending work of this rank or a slower one would be timed too.
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  barrier();
  std::vector<AllReduceRow> rows;
  for (int64_t num_bytes = 4096; num_bytes <= kLargestMeasured; num_bytes *= 4) {
    AllReduceRow row{.num_bytes = num_bytes};
    row.ring_us = time_all_reduce(data, num_bytes, AllReduceAlgorithm::Ring, memory_ != nullptr);
    if (memory_) {
      row.symmetric_us = time_all_reduce(data, num_bytes, AllReduceAlgorithm::Symmetric, true);
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace ddp::detail
