// SPDX-License-Identifier: Apache-2.0
#include "ops/streams/side_task.hpp"

#include <ATen/ATen.h>

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/streams/private_stream.hpp"
#include "ops/streams/stream_order.hpp"
#endif

namespace ddp::ops {

#ifdef DDP_HAS_CUDA
namespace {

struct SideStream {
  explicit SideStream(const c10::Stream& main)
      : stream(detail::make_private_stream(main.device())) {}
  c10::cuda::CUDAStream stream;
};

}  // namespace
#endif

SideTask::SideTask(const at::Tensor& input,
                   const std::function<at::Tensor(const at::Tensor&)>& make, bool beside) {
#ifdef DDP_HAS_CUDA
  if (beside && input.is_cuda()) {
    const auto device = input.device().index();
    const auto main = c10::cuda::getCurrentCUDAStream(device);
    const auto side = detail::beside<SideStream>(main).stream;
    detail::wait_for(main, side);
    const c10::cuda::CUDAStreamGuard guard(side);
    result_ = make(input);
    // Each tensor is made on one stream and read on the other, also in the backward. The allocator
    // must not reuse its memory before the reader is done.
    input.record_stream(side);
    result_.record_stream(main);
    done_.emplace(c10::DeviceType::CUDA);
    done_->record(side);
    return;
  }
#else
  static_cast<void>(beside);
#endif
  result_ = make(input);
}

at::Tensor SideTask::wait() {
#ifdef DDP_HAS_CUDA
  if (done_) {
    done_->block(c10::cuda::getCurrentCUDAStream(result_.device().index()));
  }
#endif
  return result_;
}

}  // namespace ddp::ops
