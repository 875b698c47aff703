// SPDX-License-Identifier: Apache-2.0
#include "pairing.hpp"

namespace cluster_check {

// All players but the last stand on a circle of odd length. In a round the sum of two partners'
// places is twice the round. The player whose partner would be itself meets the last one.
int partner_of(int rank, int round, int slots) {
  const int circle = slots - 1;
  if (rank == circle) {
    return round % circle;
  }
  const int partner = ((2 * round - rank) % circle + circle) % circle;
  return partner == rank ? circle : partner;
}

}  // namespace cluster_check
