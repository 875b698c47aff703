// SPDX-License-Identifier: Apache-2.0
// Values of an archive's JSON, with a DataError for those out of range.
#pragma once

#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <nlohmann/json.hpp>

namespace ddp::detail {

inline constexpr int kMaxJsonDepth = 400;  ///< a graph in a graph takes 10 levels

/// Throws DataError unless `json` is a whole number of at least `at_least` that fits 64 bits.
int64_t whole_number(const nlohmann::json& json, int64_t at_least, const char* what);

// The archive's own numbers of dtypes, layouts and memory formats.
at::ScalarType scalar_type(const nlohmann::json& json);
at::Layout layout(const nlohmann::json& json);
at::MemoryFormat memory_format(const nlohmann::json& json);

}  // namespace ddp::detail
