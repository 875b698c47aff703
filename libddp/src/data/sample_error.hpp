// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ddp::detail {

/// In a catch block: rethrows the exception with sample index and epoch. Errors of the library keep
/// type and exit code. Others become the cause (std::rethrow_if_nested) of an error with their
/// message.
[[noreturn]] void rethrow_with_sample(int64_t index, int64_t epoch);

}  // namespace ddp::detail
