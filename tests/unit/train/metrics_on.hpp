// SPDX-License-Identifier: Apache-2.0
// Metrics without a Context, for tests whose ranks are threads.
#pragma once

#include <memory>

#include "core/launch_environment.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/train/metrics.hpp"
#include "train/metrics_impl.hpp"

namespace testing {

inline ddp::Metrics metrics_on(ddp::ControlPlane& plane, const ddp::MetricsOptions& options,
                               const ddp::LaunchEnvironment& launch = {},
                               at::Device device = at::kCPU) {
  return ddp::Metrics(std::make_unique<ddp::detail::MetricsImpl>(
      plane, device, launch, options, [&plane](int64_t step) { plane.set_progress(step, ""); }));
}

}  // namespace testing
