// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_reductions.hpp"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

#include "comm/all_reduce_variant.hpp"
#include "comm/nccl_handle.hpp"
#include "comm/nccl_kernels.hpp"

namespace ddp::detail {
namespace {

constexpr size_t kLargestSharingEvent =
    (size_t{4} << 20) - 1;  // larger ones take longer than a wait

// NCCL has no int16 and no bool: bool reduces as bytes of 0 and 1, int16 as int32.
ncclDataType_t to_nccl(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return ncclFloat32;
    case c10::kDouble:
      return ncclFloat64;
    case c10::kHalf:
      return ncclFloat16;
    case c10::kBFloat16:
      return ncclBfloat16;
    case c10::kChar:
      return ncclInt8;
    case c10::kInt:
      return ncclInt32;
    case c10::kLong:
      return ncclInt64;
    case c10::kByte:
    case c10::kBool:
      return ncclUint8;
    default:
      throw InternalError("a dtype without an NCCL datatype passed the argument checks");
  }
}

ncclRedOp_t to_nccl(ReduceOp op, c10::ScalarType dtype) {
  if (dtype == c10::kBool) {
    return op == ReduceOp::Sum || op == ReduceOp::Max ? ncclMax : ncclMin;
  }
  switch (op) {
    case ReduceOp::Sum:
      return ncclSum;
    case ReduceOp::Avg:
      return ncclAvg;
    case ReduceOp::Min:
      return ncclMin;
    case ReduceOp::Max:
      return ncclMax;
    case ReduceOp::Product:
      return ncclProd;
  }
  throw InternalError("unknown ReduceOp");
}

}  // namespace

NcclReductions::NcclReductions(NcclHandle& handle, NcclLauncher& launcher,
                               std::shared_ptr<NcclMemory> memory, NcclAlgorithm algorithm)
    : handle_(handle), launcher_(launcher), memory_(std::move(memory)), algorithm_(algorithm) {}

ncclRedOp_t NcclReductions::ring_sum(ncclDataType_t dtype) {
  const auto found = ring_sums_.find(dtype);
  if (found != ring_sums_.end()) {
    return found->second;
  }
  double wide_one = 1;
  float one = 1;
  uint16_t half_one = dtype == ncclFloat16 ? 0x3c00 : 0x3f80;
  void* scalar = dtype == ncclFloat64   ? static_cast<void*>(&wide_one)
                 : dtype == ncclFloat32 ? static_cast<void*>(&one)
                                        : &half_one;
  const auto comm = handle_.get("all_reduce");
  ncclRedOp_t made{};
  check_nccl(ncclRedOpCreatePreMulSum(&made, scalar, dtype, ncclScalarHostImmediate, comm), comm,
             "ncclRedOpCreatePreMulSum");
  return ring_sums_[dtype] = made;  // destroyed with the communicator
}

WorkPtr NcclReductions::all_reduce(const at::Tensor& tensor, ReduceOp op, bool overlapped,
                                   const AllReduceTable& table) {
  if (tensor.scalar_type() == at::kShort) {
    return reduce_int16("all_reduce", tensor, tensor, op);
  }
  const auto lock = launcher_.lock();
  launcher_.check_usable("all_reduce");
  const auto dtype = to_nccl(tensor.scalar_type());
  const AllReduceCall call{op, tensor.scalar_type(), tensor.nbytes(), overlapped};
  const bool in_memory = memory_ && memory_->contains(tensor.const_data_ptr(), tensor.nbytes());
  auto nccl_op = to_nccl(op, tensor.scalar_type());
  std::function<void()> after;
  if (in_memory && dtype == ncclFloat64 && op == ReduceOp::Sum) {
    // NCCL's multicast would be the algorithm, which makes the ranks of a node wait for each other
    // in the call, while one of them may replay it.
    nccl_op = ring_sum(dtype);
  }
  switch (choose_variant(call, in_memory && has_symmetric_kernels(call), algorithm_, table)) {
    case AllReduceVariant::AsCalled:
      break;
    case AllReduceVariant::SumThenScale: {
      nccl_op = ncclSum;
      const auto scaled = dtype == ncclFloat32 ? ScaleDtype::Float : ScaleDtype::BFloat16;
      after = [tensor, scaled, factor = 1.0F / static_cast<float>(handle_.world_size()),
               stream = launcher_.stream()] {
        check_cuda(launch_scale(tensor.data_ptr(), tensor.numel(), scaled, {.value = factor},
                                stream.stream()),
                   "launch_scale");
      };
      break;
    }
    case AllReduceVariant::ScaleByOneThenSum:
      nccl_op = ring_sum(dtype);
      break;
  }
  const bool shares_event =
      !overlapped && !after && !launcher_.in_group() && tensor.nbytes() <= kLargestSharingEvent;
  return launcher_.launch(
      "all_reduce", tensor, {tensor},
      [&](ncclComm_t comm, cudaStream_t stream) {
        void* data = tensor.data_ptr();
        return ncclAllReduce(data, data, static_cast<size_t>(tensor.numel()), dtype, nccl_op, comm,
                             stream);
      },
      std::move(after), shares_event);
}

WorkPtr NcclReductions::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                       ReduceOp op) {
  if (input.scalar_type() == at::kShort) {
    return reduce_int16("reduce_scatter", output, input, op);
  }
  return launcher_.launch(
      "reduce_scatter", input, {output, input}, [&](ncclComm_t comm, cudaStream_t stream) {
        return ncclReduceScatter(input.const_data_ptr(), output.data_ptr(),
                                 static_cast<size_t>(output.numel()), to_nccl(input.scalar_type()),
                                 to_nccl(op, input.scalar_type()), comm, stream);
      });
}

WorkPtr NcclReductions::reduce_int16(const char* name, const at::Tensor& output,
                                     const at::Tensor& input, ReduceOp op) {
  // All on the communicator's stream. 32-bit sums and products truncate to the 16-bit results.
  const auto lock = launcher_.lock();
  launcher_.check_usable(name);
  at::Tensor wide_input;
  at::Tensor wide_output;
  {
    const c10::cuda::CUDAGuard device_guard(handle_.device());
    launcher_.begin(/*shares_event=*/false);
    const c10::cuda::CUDAStreamGuard guard(launcher_.stream());
    const auto flat = input.as_strided({input.numel()}, {1});
    wide_input = flat.to(at::kInt);
    wide_output =
        input.is_same(output) ? wide_input : at::empty({output.numel()}, wide_input.options());
  }
  const bool scatters = !input.is_same(output);
  return launcher_.launch(
      name, input, {output, input, wide_input, wide_output},
      [&](ncclComm_t comm, cudaStream_t stream) {
        const auto count = static_cast<size_t>(wide_output.numel());
        const auto nccl_op = to_nccl(op, at::kInt);
        return scatters ? ncclReduceScatter(wide_input.const_data_ptr(), wide_output.data_ptr(),
                                            count, ncclInt32, nccl_op, comm, stream)
                        : ncclAllReduce(wide_input.const_data_ptr(), wide_output.data_ptr(), count,
                                        ncclInt32, nccl_op, comm, stream);
      },
      [output, wide_output, stream = launcher_.stream()] {
        const c10::cuda::CUDAStreamGuard guard(stream);
        output.as_strided({output.numel()}, {1}).copy_(wide_output);
      });
}

}  // namespace ddp::detail
