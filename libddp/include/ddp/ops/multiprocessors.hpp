// SPDX-License-Identifier: Apache-2.0
// Room on the GPU for what runs beside ops.
#pragma once

namespace ddp::ops {

/// Kernels whose blocks wait for each other start only when all of them have room. From now on they
/// are made for so many multiprocessors less than the device has, so that a collective which holds
/// that many beside backward does not hold them up. For all devices and threads of the process;
/// their sums are then taken in another order. 0, the default, leaves none free.
void reserve_multiprocessors(int count);
int reserved_multiprocessors();

}  // namespace ddp::ops
