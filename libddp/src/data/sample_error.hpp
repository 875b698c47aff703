// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ddp::detail {

/// In a catch block: throws the exception anew with which sample it was. Errors of the library keep
/// type and exit code; others become the cause (std::rethrow_if_nested) of an error that holds
/// their message.
[[noreturn]] void rethrow_with_sample(int64_t index, int64_t epoch);

}  // namespace ddp::detail
