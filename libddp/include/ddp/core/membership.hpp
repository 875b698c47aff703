// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

/// The ranks that met, and this process's place among them. When the ranks of a job meet again,
/// they form the next generation, whose ranks may be fewer and have other numbers.
struct Membership {
  int64_t generation = 0;  ///< earlier meetings of the job's ranks
  int rank = 0;            ///< of this process, 0 … world_size - 1
  int world_size = 1;      ///< number of ranks
  /// Host name of each rank. Empty for a group made by Communicator::split().
  std::vector<std::string> hosts = {};
};

}  // namespace ddp
