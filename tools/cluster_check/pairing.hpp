// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cluster_check {

/// The partner of `rank` in `round` of a round-robin tournament (circle method) of `slots` players,
/// an even number. In rounds 0 to slots - 2 every player meets every other one exactly once.
int partner_of(int rank, int round, int slots);

}  // namespace cluster_check
