// SPDX-License-Identifier: Apache-2.0
// Multiprocessors reserved for kernels concurrent with ops.
#pragma once

namespace ddp::ops {

/// Kernels whose blocks wait for each other start only when all blocks have room. During this
/// object's lifetime they are launched (or captured) for `count` multiprocessors fewer than the
/// device has. A collective that holds `count` multiprocessors during backward then does not delay
/// them. The largest of several reservations applies, to all devices and threads of the process.
/// Such kernels then sum in another order. Other kernels are unaffected.
class MultiprocessorReservation {
 public:
  explicit MultiprocessorReservation(int count);
  ~MultiprocessorReservation();
  MultiprocessorReservation(const MultiprocessorReservation&) = delete;
  MultiprocessorReservation& operator=(const MultiprocessorReservation&) = delete;

 private:
  const int count_;
};

/// The largest count of all live reservations; 0 without any.
int reserved_multiprocessors();

}  // namespace ddp::ops
