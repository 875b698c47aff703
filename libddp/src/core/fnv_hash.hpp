// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ddp::detail {

/// FNV-1a with a 64-bit value in place of each byte.
class FnvHash {
 public:
  void add(uint64_t value) { value_ = (value_ ^ value) * 0x100000001B3ULL; }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325ULL;
};

}  // namespace ddp::detail
