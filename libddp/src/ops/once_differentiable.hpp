// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace ddp::ops::detail {

/// Call first in a backward whose results carry no graph. With create_graph, gradients through them
/// would be silently lost.
inline void check_differentiated_once(const char* op) {
  TORCH_CHECK(!c10::GradMode::is_enabled(), op,
              ": create_graph=true, but this op's gradient cannot be differentiated again; compute "
              "what is differentiated twice by PyTorch's ops (of a ResNet: fused_ops=false)");
}

}  // namespace ddp::ops::detail
