// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ddp/core/control_plane.hpp"
#include "ddp/core/state_dict.hpp"

namespace examples {

/// 16 hexadecimal digits over names, dtypes, shapes and every bit of the values: equal hashes mean
/// equal tensors. The host waits for the device.
std::string parameter_hash(const ddp::NamedParameters& parameters);

/// Returns this rank's hash if all ranks agree; throws MismatchError naming the first rank that
/// differs. Collective.
std::string common_parameter_hash(const ddp::NamedParameters& parameters,
                                  ddp::ControlPlane& control_plane);

}  // namespace examples
