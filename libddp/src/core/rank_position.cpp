// SPDX-License-Identifier: Apache-2.0
#include "core/rank_position.hpp"

#include <algorithm>

#include "core/byte_codec.hpp"

namespace ddp::detail {
namespace {

// Extra groups are omitted: positions are only a diagnostic, and rank 0 stores one per rank.
constexpr std::size_t kMaxGroups = 256;
constexpr std::size_t kMaxWord = 1024;

}  // namespace

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

std::string encode_position(const RankPosition& position) {
  ByteWriter writer;
  writer.signed_number(position.step).text(position.where.substr(0, kMaxWord));
  writer.number(position.plane_call).number(static_cast<uint8_t>(position.one_thread ? 1 : 0));
  const auto num_groups = std::min(position.groups.size(), kMaxGroups);
  writer.number(static_cast<uint32_t>(num_groups));
  for (std::size_t i = 0; i < num_groups; ++i) {
    const auto& group = position.groups[i];
    writer.text(group.id.substr(0, kMaxWord)).number(group.num_called).number(group.pending);
    writer.text(group.operation.substr(0, kMaxWord)).number(group.waited);
    writer.number(static_cast<uint8_t>(group.is_check ? 1 : 0));
  }
  return writer.take();
}

bool decode_position(std::string_view bytes, RankPosition& position) {
  ByteReader reader(bytes);
  position.step = reader.signed_number();
  position.where = reader.text();
  position.plane_call = reader.number<uint64_t>();
  position.one_thread = reader.number<uint8_t>() == 1;
  const auto num_groups = reader.number<uint32_t>();
  position.groups.clear();
  for (uint32_t i = 0; i < num_groups && i < kMaxGroups && reader.ok(); ++i) {
    auto& group = position.groups.emplace_back();
    group.id = reader.text();
    group.num_called = reader.number<uint64_t>();
    group.pending = reader.number<uint64_t>();
    group.operation = reader.text();
    group.waited = reader.number<uint64_t>();
    group.is_check = reader.number<uint8_t>() == 1;
  }
  return reader.finished();
}

ActivityScope::ActivityScope(ControlPlane& control_plane, std::string activity)
    : board_(dynamic_cast<PositionBoard*>(&control_plane)) {
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
