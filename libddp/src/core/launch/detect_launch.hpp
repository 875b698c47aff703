// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/launch/launch_environment.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp {

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;
EnvironmentLookup process_environment();  ///< the process's own
/// The first source of LaunchSource's order that names a rank. Ignores other launchers' variables;
/// empty ones count as unset. Throws SettingsError naming both sides of a contradiction in the
/// source or with the arguments.
LaunchEnvironment detect_launch_environment(const LaunchArguments& arguments,
                                            const EnvironmentLookup& environment);

}  // namespace ddp
