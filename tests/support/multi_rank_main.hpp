// SPDX-License-Identifier: Apache-2.0
// For tests that run as several ranks. The program's main creates one Context for all test cases.
// Every rank runs the same cases in the same order, with a barrier after each. The first failing
// case on any rank ends the run: the other ranks are notified, their collectives are aborted.
#pragma once

#include "ddp/comm/context.hpp"

namespace ddp::test {

/// This rank's context, shared by all test cases of the program.
Context& context();

/// True if the communicators compare the ranks' calls. On CPU they do unless
/// DDP_TEST_CHECK_COLLECTIVES=0, so every test also checks that the calls agree. On GPUs only with
/// =1: some tests replay on one rank what another runs eagerly, which cannot be compared.
bool checks_collectives();

}  // namespace ddp::test
