// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/multiprocessors.hpp"

#include <atomic>

namespace ddp::ops {
namespace {
std::atomic<int> reserved{0};
}  // namespace

void reserve_multiprocessors(int count) {
  reserved = count;
}

int reserved_multiprocessors() {
  return reserved;
}

}  // namespace ddp::ops
