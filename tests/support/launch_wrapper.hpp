// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ddp::test {

/// Implements `ddp_test_launch --wrap SOCKET LOG_PREFIX -- program args…`, which mpirun starts in
/// place of the program. Runs the program with its output in LOG_PREFIX<rank>. Reports "start
/// <rank> <pid>" and "exit <rank> <code>" on the socket. Then it stays until the launcher has heard
/// of all ranks: mpirun kills every rank once one of its own children exits, and a test observes
/// the survivors.
int run_wrapper(int argc, char** argv);

}  // namespace ddp::test
