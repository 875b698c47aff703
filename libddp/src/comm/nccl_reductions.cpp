// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_reductions.hpp"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

#include "comm/nccl_handle.hpp"
#include "comm/nccl_kernels.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::detail {
namespace {

constexpr size_t kLeastCopied = size_t{1} << 20;
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

bool can_be_copied(const at::Tensor& tensor, ReduceOp op) {
  const auto dtype = tensor.scalar_type();
  return (op == ReduceOp::Sum || op == ReduceOp::Avg) &&
         (dtype == c10::kFloat || dtype == c10::kBFloat16 || dtype == c10::kHalf) &&
         tensor.nbytes() >= kLeastCopied && ops::detail::is_aligned(tensor);
}

}  // namespace

NcclReductions::NcclReductions(NcclHandle& handle, NcclLauncher& launcher,
                               std::shared_ptr<NcclMemory> memory)
    : handle_(handle), launcher_(launcher), memory_(std::move(memory)) {}

// No rank writes into another's slots and flags before all of them are ready: a rank reduces in
// memory that it registered later, for which NCCL waits for all ranks.
at::Tensor NcclReductions::allocate(int64_t num_bytes) {
  if (!slots_.defined()) {
    const auto flags_bytes = CopyAllReduce::flags_bytes(handle_.world_size());
    slots_ = memory_->allocate(static_cast<int64_t>(CopyAllReduce::kSlotsBytes));
    flags_ = memory_->allocate(static_cast<int64_t>(flags_bytes)).zero_();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    auto slots = memory_->find(slots_.const_data_ptr(), slots_.nbytes());
    auto flags = memory_->find(flags_.const_data_ptr(), flags_bytes);
    if (!slots.empty()) {
      copies_ = std::make_unique<CopyAllReduce>(handle_.rank(), std::move(slots), std::move(flags));
    }
  }
  return memory_->allocate(num_bytes);
}

// Beside computation copies are best, which take no multiprocessors. Alone, NCCL's kernels are
// faster.
ncclResult_t NcclReductions::call_all_reduce(const at::Tensor& tensor, ReduceOp op, bool overlapped,
                                             ncclComm_t comm, cudaStream_t stream) {
  void* const data = tensor.data_ptr();
  if (overlapped && copies_ != nullptr && can_be_copied(tensor, op)) {
    if (const auto everywhere = memory_->find(data, tensor.nbytes()); !everywhere.empty()) {
      copies_->run(everywhere, tensor.nbytes(), ops::detail::element_of(tensor.scalar_type()),
                   op == ReduceOp::Avg, stream);
      return ncclSuccess;
    }
  }
  return ncclAllReduce(data, data, static_cast<size_t>(tensor.numel()),
                       to_nccl(tensor.scalar_type()), to_nccl(op, tensor.scalar_type()), comm,
                       stream);
}

void NcclReductions::enqueue_all_reduce(const at::Tensor& tensor, ReduceOp op) {
  launcher_.enqueue("all_reduce", [&](ncclComm_t comm, cudaStream_t stream) {
    return call_all_reduce(tensor, op, /*overlapped=*/false, comm, stream);
  });
}

WorkPtr NcclReductions::all_reduce(const at::Tensor& tensor, ReduceOp op, bool overlapped) {
  if (tensor.scalar_type() == at::kShort) {
    return reduce_int16("all_reduce", tensor, tensor, op);
  }
  const auto lock = launcher_.lock();
  const bool shares_event =
      !overlapped && !launcher_.in_group() && tensor.nbytes() <= kLargestSharingEvent;
  return launcher_.launch(
      "all_reduce", tensor, {tensor},
      [&](ncclComm_t comm, cudaStream_t stream) {
        return call_all_reduce(tensor, op, overlapped, comm, stream);
      },
      /*after=*/nullptr, shares_event);
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
