// SPDX-License-Identifier: Apache-2.0
#include "optim/capture.hpp"

#include "ddp/core/error.hpp"

#ifdef DDP_HAS_CUDA
#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace ddp::detail {

bool stream_is_capturing() {
#ifdef DDP_HAS_CUDA
  // A program without a CUDA context cannot capture, and this query must not make a context.
  return at::globalContext().hasCUDA() &&
         c10::cuda::hasPrimaryContext(c10::cuda::current_device()) &&
         c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

void refuse_to_make_while_capturing(const std::string& what) {
  if (stream_is_capturing()) {
    throw SettingsError(concat(what,
                               " would be made inside a CUDA graph, and again by each replay; ",
                               "run one step eagerly before capturing"));
  }
}

}  // namespace ddp::detail
