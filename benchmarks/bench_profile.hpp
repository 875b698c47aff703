// SPDX-License-Identifier: Apache-2.0
// Writes the device's work in a few steps as a Chrome trace for step_profile.py.
#pragma once

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <string>

namespace bench {

/// Writes kernels, copies and CUDA calls of `steps` steps (ATen's operators on a CPU) to `path`.
inline void write_profile(const std::string& path, at::Device device, int64_t steps,
                          const std::function<void()>& step) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<torch::profiler::impl::ActivityType> activities = {
      device.is_cuda() ? torch::profiler::impl::ActivityType::CUDA
                       : torch::profiler::impl::ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  for (int64_t i = 0; i < steps; ++i) {
    step();
  }
  if (device.is_cuda()) {
    torch::cuda::synchronize();
  }
  profiler::disableProfiler()->save(path);
}

}  // namespace bench
