// SPDX-License-Identifier: Apache-2.0
#include "pairing.hpp"

#include <algorithm>

#include "ddp/detail/text.hpp"
#include "report.hpp"

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

PairMatrix pairs_from(const std::vector<std::vector<int64_t>>& received) {
  const std::size_t ranks = received.size();
  PairMatrix pairs(ranks, std::vector<double>(ranks, 0));
  for (std::size_t to = 0; to < ranks; ++to) {
    for (std::size_t from = 0; from < ranks; ++from) {
      pairs[from][to] = static_cast<double>(received[to][from]) / 1e6;
    }
  }
  return pairs;
}

Links links_of(const PairMatrix& pairs, const std::vector<int64_t>& node_of) {
  Links links;
  for (std::size_t from = 0; from < pairs.size(); ++from) {
    for (std::size_t to = 0; to < pairs.size(); ++to) {
      if (from != to) {
        auto& kind = node_of[from] == node_of[to] ? links.same_node : links.other_node;
        kind.push_back({pairs[from][to], from, to});
      }
    }
  }
  return links;
}

SlowestLink slowest_of(const std::vector<Link>& links, const std::vector<std::string>& hosts) {
  std::vector<double> speeds;
  for (const auto& link : links) {
    speeds.push_back(link.gbps);
  }
  const auto& slowest = *std::min_element(
      links.begin(), links.end(), [](const Link& a, const Link& b) { return a.gbps < b.gbps; });
  const double median = median_of(speeds);
  const double percent = 100 * (median - slowest.gbps) / median;
  ddp::detail::TextStream text;
  text.precision(3);
  text << "slowest: rank " << slowest.from << " on " << hosts[slowest.from] << " to rank "
       << slowest.to << " on " << hosts[slowest.to] << ", " << percent << " % below the median of "
       << links.size() << " links";
  return {slowest, percent, text.str()};
}

}  // namespace cluster_check
