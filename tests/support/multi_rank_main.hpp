// SPDX-License-Identifier: Apache-2.0
// For tests that run as several ranks: the program's main makes one Context for all of its test
// cases. Every rank runs the same cases in the same order; the ranks meet after each. The first
// failing case on any rank ends the run: the others are told, their collectives are aborted.
#pragma once

#include "ddp/comm/context.hpp"

namespace ddp::test {

/// This rank's context, shared by all test cases of the program.
Context& context();

/// Whether its communicators compare what is called. On CPU they do, so that every test also shows
/// that the ranks call the same, unless DDP_TEST_CHECK_COLLECTIVES=0. On GPUs they do with =1:
/// some tests replay on one rank what another runs eagerly, which cannot be compared.
bool checks_collectives();

}  // namespace ddp::test
