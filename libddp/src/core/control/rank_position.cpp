// SPDX-License-Identifier: Apache-2.0
#include "core/control/rank_position.hpp"

#include <algorithm>

#include "core/control/wire/message_codec.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

thread_local int num_uneven_loops = 0;

}  // namespace

std::string with_label(std::string call, const std::string& label) {
  if (label.empty()) {
    return call;
  }
  if (!call.ends_with(')')) {
    return concat(call, " (", label, ")");
  }
  call.back() = ';';
  return concat(call, " ", label, ")");
}

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

void cut_text(std::string& text, std::size_t size) {
  if (text.size() <= size) {
    return;
  }
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0U) == 0x80U) {
    --size;
  }
  text.resize(size);
}

void cut_to_limits(RankPosition& position) {
  cut_text(position.where, kMaxPlaceBytes);
  position.groups.resize(std::min(position.groups.size(), kMaxPositionGroups));
  for (auto& group : position.groups) {
    for (auto* text : {&group.id, &group.operation, &group.label}) {
      cut_text(*text, kMaxPlaceBytes);
    }
  }
}

std::string encode_position(RankPosition position) {
  cut_to_limits(position);
  return encode_message(position);
}

UnevenLoop::UnevenLoop() {
  ++num_uneven_loops;
}
UnevenLoop::~UnevenLoop() {
  --num_uneven_loops;
}

void refuse_in_uneven_loop(const std::string& call) {
  if (num_uneven_loops > 0) {
    throw SettingsError(concat(
        "join(model, loop) cannot contain a call that all ranks must make, here ", call,
        ": ranks that ran out of batches only answer forwards, and would miss the calls of "
        "Metrics, Checkpointer, StopPoll, EarlyStopping and collectives with gradients; fix: use "
        "join(model, step, has_batch), in which every rank makes every step "
        "(docs/recipes/uneven_data.md)"));
  }
}

ActivityScope::ActivityScope(ControlPlane& control_plane, std::string activity)
    : board_(control_plane.position_board()) {
  if (board_ != nullptr) {
    refuse_in_uneven_loop(activity);
    before_ = board_->set_activity(std::move(activity));
  }
}

ActivityScope::~ActivityScope() {
  if (board_ != nullptr) {
    board_->set_activity(std::move(before_));
  }
}

}  // namespace ddp::detail
