// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/checkpoint_exchange.hpp"

#include <algorithm>
#include <set>

namespace ddp::detail {
StatusDigest StatusDigest::of(const std::vector<RankStatus>& statuses) {
  const double slowest = slowest_step(statuses);
  // Decisions depend on the first rank with a status, so the digest keeps that rank.
  StatusDigest digest{.world_size = statuses.size(), .first_with = {}};
  std::set<std::string> seen;
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    auto status = statuses[rank];
    status.step_seconds = slowest;
    status.pause_seconds = statuses[0].pause_seconds;
    status.writer.records.clear();
    if (seen.insert(encode_message(status)).second) {
      digest.first_with.emplace_back(rank, std::move(status));
    }
  }
  return digest;
}

std::vector<RankStatus> StatusDigest::statuses() const {
  std::vector<RankStatus> statuses(world_size);
  for (const auto& [rank, status] : first_with) {
    statuses.at(rank) = status;
  }
  return statuses;
}

std::vector<RankStatus> exchange_statuses(ControlPlane& control_plane, const RankStatus& own) {
  auto statuses = gather_messages(control_plane, own);
  const bool is_main = control_plane.rank() == 0;
  const auto digest =
      broadcast_message(control_plane, is_main ? StatusDigest::of(statuses) : StatusDigest{});
  return is_main ? statuses : digest.statuses();
}

double slowest_step(const std::vector<RankStatus>& statuses) {
  double slowest = 0;
  for (const auto& status : statuses) {
    slowest = std::max(slowest, status.step_seconds);
  }
  return slowest;
}

}  // namespace ddp::detail
