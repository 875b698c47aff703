// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Describes a collective in messages. Small, because one is stored per recent collective.
struct CollectiveRecord {
  const char* name = "";
  int64_t sequence = 0;
  int64_t num_elements = 0;
  int64_t num_bytes = 0;
  c10::ScalarType dtype = c10::kByte;

  std::string to_string() const {
    return concat(name, " #", sequence, " (", num_elements, " ", c10::toString(dtype), ", ",
                  num_bytes, " bytes)");
  }
};

/// One counter may cover several collectives: any of them may have failed to end.
inline std::string one_of(const CollectiveRecord& first, const CollectiveRecord& last) {
  return first.sequence == last.sequence
             ? first.to_string()
             : concat("one of ", first.to_string(), " to ", last.to_string());
}

}  // namespace ddp::detail
