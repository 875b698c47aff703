// SPDX-License-Identifier: Apache-2.0
// The collectives. nccl_launch.cpp launches them.
#include "comm/nccl_communicator.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "comm/nccl_communicator_impl.hpp"
#include "comm/nccl_types.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
WorkPtr NcclCommunicator::reduce_int16(const char* name, const at::Tensor& output,
                                       const at::Tensor& input, ReduceOp op) {
  // All on the communicator's stream. 32-bit sums and products truncate to the 16-bit results.
  const std::lock_guard lock(mutex_);
  check_usable(name);
  at::Tensor wide_input;
  at::Tensor wide_output;
  {
    const c10::cuda::CUDAGuard device_guard(device_);
    begin_launch(/*shares_end=*/false);
    const c10::cuda::CUDAStreamGuard guard(stream_);
    const auto flat = input.as_strided({input.numel()}, {1});
    wide_input = flat.to(at::kInt);
    wide_output =
        input.is_same(output) ? wide_input : at::empty({output.numel()}, wide_input.options());
  }
  const bool scatters = !input.is_same(output);
  return launch_locked(
      name, input, {output, input, wide_input, wide_output},
      [&](ncclComm_t comm, cudaStream_t stream) {
        const auto count = static_cast<size_t>(wide_output.numel());
        const auto nccl_op = to_nccl(op, at::kInt);
        return scatters ? ncclReduceScatter(wide_input.const_data_ptr(), wide_output.data_ptr(),
                                            count, ncclInt32, nccl_op, comm, stream)
                        : ncclAllReduce(wide_input.const_data_ptr(), wide_output.data_ptr(), count,
                                        ncclInt32, nccl_op, comm, stream);
      },
      [output, wide_output, stream = stream_] {
        const c10::cuda::CUDAStreamGuard guard(stream);
        output.as_strided({output.numel()}, {1}).copy_(wide_output);
      });
}

WorkPtr NcclCommunicator::broadcast(at::Tensor tensor, int root) {
  check_broadcast(info(), tensor, root);
  compare("broadcast", tensor, std::nullopt, root);
  return launch("broadcast", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    void* data = tensor.data_ptr();
    return ncclBroadcast(data, data, tensor.nbytes(), ncclUint8, root, comm, stream);
  });
}

WorkPtr NcclCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) {
  check_reduce_scatter(info(), output, input, op);
  compare("reduce_scatter", input, op);
  if (input.scalar_type() == at::kShort) {
    return reduce_int16("reduce_scatter", output, input, op);
  }
  return launch(
      "reduce_scatter", input, {output, input}, [&](ncclComm_t comm, cudaStream_t stream) {
        return ncclReduceScatter(input.const_data_ptr(), output.data_ptr(),
                                 static_cast<size_t>(output.numel()), to_nccl(input.scalar_type()),
                                 to_nccl(op, input.scalar_type()), comm, stream);
      });
}

WorkPtr NcclCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  check_all_gather(info(), output, input);
  compare("all_gather", output);
  return launch("all_gather", output, {output, input}, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclAllGather(input.const_data_ptr(), output.data_ptr(), input.nbytes(), ncclUint8, comm,
                         stream);
  });
}

WorkPtr NcclCommunicator::send(at::Tensor tensor, int destination) {
  check_peer(info(), "send", tensor, destination);
  return launch("send", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclSend(tensor.const_data_ptr(), tensor.nbytes(), ncclUint8, destination, comm, stream);
  });
}

WorkPtr NcclCommunicator::recv(at::Tensor tensor, int source) {
  check_peer(info(), "recv", tensor, source);
  return launch("recv", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclRecv(tensor.data_ptr(), tensor.nbytes(), ncclUint8, source, comm, stream);
  });
}

void NcclCommunicator::barrier() {
  compare("barrier");
  {
    const std::lock_guard lock(mutex_);
    if (!barrier_buffer_.defined()) {
      barrier_buffer_ = at::zeros({1}, at::device(device()).dtype(at::kInt));
    }
  }
  launch("barrier", barrier_buffer_, {barrier_buffer_}, [&](ncclComm_t comm, cudaStream_t stream) {
    void* data = barrier_buffer_.data_ptr();
    return ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream);
  })->wait_host();
}

at::Tensor NcclCommunicator::allocate(int64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  check_usable("allocate");
  check_allocation(num_bytes);
  const c10::cuda::CUDAGuard guard(device_);
  if (memory_ && num_bytes > 0) {
    auto memory = memory_->allocate(num_bytes);
    measure_when_due();
    return memory;
  }
  return at::empty({num_bytes},
                   at::device(device()).dtype(at::kByte));  // caching: 512-byte aligned
}

CommunicatorPtr make_nccl_communicator(ControlPlane& control_plane, at::Device device,
                                       const CommunicatorOptions& options,
                                       CollectiveFailureHandler on_failure,
                                       std::shared_ptr<CollectiveCheck> check,
                                       const WatchPosition& watch) {
  DDP_CHECK(device.is_cuda() && device.has_index(), device.str());
  const c10::cuda::CUDAGuard guard(device.index());
  ncclComm_t comm = connect_nccl(control_plane, device.index(), options);
  std::string no_windows;
  if (options.nccl_algorithm != "ring" && control_plane.world_size() > 1) {
    no_windows = why_no_windows(control_plane);
    if (!no_windows.empty() && control_plane.rank() == 0) {
      log(options.nccl_algorithm == "symmetric" ? LogLevel::Warning : LogLevel::Info,
          concat("context.communicator.nccl_algorithm=", options.nccl_algorithm,
                 ": symmetric windows are not available, ring is used: ", no_windows));
    }
  }
  auto made = std::make_shared<NcclCommunicator>(
      comm, device.index(), options, std::move(on_failure),
      std::make_shared<std::atomic<int64_t>>(0), std::move(no_windows), std::move(check));
  made->start_watchdog();
  made->tell_positions("world", watch);
  return made;
}

}  // namespace ddp::detail
