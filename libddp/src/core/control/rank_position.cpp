// SPDX-License-Identifier: Apache-2.0
#include "core/control/rank_position.hpp"

#include <algorithm>

#include "core/control/wire/message_codec.hpp"

namespace ddp::detail {

bool RankPosition::waits() const {
  return plane_call != 0 || std::any_of(groups.begin(), groups.end(), [](const auto& group) {
           return group.pending != 0 || group.waited != 0;
         });
}

const GroupPosition* RankPosition::find(std::string_view id) const {
  const auto found = std::find_if(groups.begin(), groups.end(),
                                  [id](const auto& group) { return group.id == id; });
  return found == groups.end() ? nullptr : &*found;
}

std::string encode_position(RankPosition position) {
  position.where.resize(std::min(position.where.size(), kMaxPlaceBytes));
  position.groups.resize(std::min(position.groups.size(), kMaxPositionGroups));
  for (auto& group : position.groups) {
    group.id.resize(std::min(group.id.size(), kMaxPlaceBytes));
    group.operation.resize(std::min(group.operation.size(), kMaxPlaceBytes));
  }
  return encode_message(position);
}

ActivityScope::ActivityScope(ControlPlane& control_plane, std::string activity)
    : board_(control_plane.position_board()) {
  if (board_ != nullptr) {
    before_ = board_->set_activity(std::move(activity));
  }
}

ActivityScope::~ActivityScope() {
  if (board_ != nullptr) {
    board_->set_activity(std::move(before_));
  }
}

}  // namespace ddp::detail
