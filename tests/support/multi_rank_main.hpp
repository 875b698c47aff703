// SPDX-License-Identifier: Apache-2.0
// For tests that run as several ranks: the program's main makes one Context for all of its test
// cases. Every rank runs the same cases in the same order; the ranks meet after each. The first
// failing case on any rank ends the run: the others are told, their collectives are aborted.
#pragma once

#include "ddp/comm/context.hpp"

namespace ddp::test {

/// This rank's context, shared by all test cases of the program.
Context& context();

}  // namespace ddp::test
