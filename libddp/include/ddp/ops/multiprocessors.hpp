// SPDX-License-Identifier: Apache-2.0
// Room on the GPU for what runs beside ops.
#pragma once

namespace ddp::ops {

/// Kernels whose blocks wait for each other start only when all of them have room. While this
/// lives, those launched (or captured) are made for `count` multiprocessors less than the device
/// has, so that a collective which holds that many beside backward does not hold them up. Of
/// several that live the largest counts. For all devices and threads of the process; such a
/// kernel's sums are taken in another order then. Other kernels stay as they are.
class MultiprocessorReservation {
 public:
  explicit MultiprocessorReservation(int count);
  ~MultiprocessorReservation();
  MultiprocessorReservation(const MultiprocessorReservation&) = delete;
  MultiprocessorReservation& operator=(const MultiprocessorReservation&) = delete;

 private:
  const int count_;
};

/// The largest count of those that live; 0 without any.
int reserved_multiprocessors();

}  // namespace ddp::ops
