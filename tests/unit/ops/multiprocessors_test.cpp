// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/multiprocessors.hpp"

#include <memory>

#include "support/catch.hpp"

using ddp::ops::MultiprocessorReservation;
using ddp::ops::reserved_multiprocessors;

TEST_CASE("the largest reservation counts while it lives") {
  CHECK(reserved_multiprocessors() == 0);
  auto training = std::make_unique<MultiprocessorReservation>(24);
  {
    const MultiprocessorReservation other(8);
    const MultiprocessorReservation alike(24);
    CHECK(reserved_multiprocessors() == 24);
    training = nullptr;
    CHECK(reserved_multiprocessors() == 24);
  }
  CHECK(reserved_multiprocessors() == 0);
  training = std::make_unique<MultiprocessorReservation>(8);
  CHECK(reserved_multiprocessors() == 8);
  training = nullptr;
  CHECK(reserved_multiprocessors() == 0);
}
