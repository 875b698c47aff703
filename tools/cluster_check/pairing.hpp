// SPDX-License-Identifier: Apache-2.0
// Which ranks of the pairs measurement meet when, and its slow links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "row.hpp"

namespace cluster_check {

/// The partner of `rank` in `round` of a round-robin tournament (circle method) of `slots` players,
/// an even number. In rounds 0 to slots - 2 every player meets every other one exactly once.
int partner_of(int rank, int round, int slots);

/// `received[to][from]` is what rank `to` measured, in kB/s.
PairMatrix pairs_from(const std::vector<std::vector<int64_t>>& received);

struct Link {
  double gbps = 0;
  std::size_t from = 0, to = 0;
};
struct Links {
  std::vector<Link> same_node, other_node;
};
/// `node_of` holds the node of each rank.
Links links_of(const PairMatrix& pairs, const std::vector<int64_t>& node_of);

struct SlowestLink {
  Link link{};
  double percent = -1;  ///< below the median of its kind; -1: no such link
  std::string text{};   ///< its ranks and nodes
};
/// `links` must not be empty. `hosts` are those of the ranks.
SlowestLink slowest_of(const std::vector<Link>& links, const std::vector<std::string>& hosts);

}  // namespace cluster_check
