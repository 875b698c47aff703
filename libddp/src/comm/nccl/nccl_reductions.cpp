// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_reductions.hpp"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

#include "comm/nccl/nccl_handle.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

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

ncclResult_t call_all_reduce(const at::Tensor& tensor, ReduceOp op, ncclComm_t comm,
                             cudaStream_t stream) {
  void* const data = tensor.data_ptr();
  return ncclAllReduce(data, data, static_cast<size_t>(tensor.numel()),
                       to_nccl(tensor.scalar_type()), to_nccl(op, tensor.scalar_type()), comm,
                       stream);
}

}  // namespace

void NcclReductions::enqueue_all_reduce(const at::Tensor& tensor, ReduceOp op) {
  launcher_.enqueue("all_reduce", [&](ncclComm_t comm, cudaStream_t stream) {
    return call_all_reduce(tensor, op, comm, stream);
  });
}

WorkPtr NcclReductions::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  if (tensor.scalar_type() == at::kShort) {
    return reduce_int16("all_reduce", tensor, tensor, op);
  }
  return launcher_.launch("all_reduce", tensor, {tensor},
                          [&](ncclComm_t comm, cudaStream_t stream) {
                            return call_all_reduce(tensor, op, comm, stream);
                          });
}

WorkPtr NcclReductions::reduce(const at::Tensor& tensor, int root, bool receives, ReduceOp op) {
  if (tensor.scalar_type() == at::kShort) {
    // An all-reduce, whose result the other ranks drop.
    const auto reduced = receives ? tensor : tensor.clone();
    return reduce_int16("reduce", reduced, reduced, op);
  }
  return launcher_.launch("reduce", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclReduce(tensor.const_data_ptr(), receives ? tensor.data_ptr() : nullptr,
                      static_cast<size_t>(tensor.numel()), to_nccl(tensor.scalar_type()),
                      to_nccl(op, tensor.scalar_type()), root, comm, stream);
  });
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
    launcher_.begin();
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
