// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/launch/detect_launch.hpp"

namespace ddp::detail {

/// A warning if the scheduler has several tasks for this job, but no launcher started this process
/// as one of them: it would train alone. Empty if it may. An argument world_size states the intent.
std::string describe_lone_process(const LaunchEnvironment& launch, const LaunchArguments& arguments,
                                  const EnvironmentLookup& environment);

}  // namespace ddp::detail
