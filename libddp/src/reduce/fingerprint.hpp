// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ddp/core/state_dict.hpp"

namespace ddp::detail {

/// 16 hexadecimal digits (XXH3) over names, dtypes, shapes and every bit of the values. The host
/// waits for the device; device memory is copied in pieces.
std::string fingerprint_of(const NamedParameters& parameters);

}  // namespace ddp::detail
