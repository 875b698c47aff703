// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ddp::test {

/// `ddp_test_launch --wrap SOCKET LOG_PREFIX -- program args…`: what mpirun starts in place of the
/// program. Runs the program with its output in LOG_PREFIX<rank>, reports "start <rank> <pid>" and
/// "exit <rank> <code>" on the socket, and then stays until the launcher has heard of all ranks:
/// mpirun kills every rank as soon as one of its own children is gone, and a test wants to see what
/// the survivors do.
int run_wrapper(int argc, char** argv);

}  // namespace ddp::test
