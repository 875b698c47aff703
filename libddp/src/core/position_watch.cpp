// SPDX-License-Identifier: Apache-2.0
#include "core/position_watch.hpp"

#include <algorithm>
#include <utility>

namespace ddp::detail {
namespace {

// An unchanged position is sent once per this many looks.
constexpr int kLooksPerMessage = 10;

}  // namespace

PositionWatch::PositionWatch(const ProgressTracker& progress,
                             std::chrono::milliseconds heartbeat_interval)
    : progress_(progress),
      interval_(std::clamp(heartbeat_interval / 10, std::chrono::milliseconds(20),
                           std::chrono::milliseconds(500))) {}

void PositionWatch::add_probe(PositionBoard::Probe probe) {
  probes_.push_back(std::move(probe));
}

RankPosition PositionWatch::read_position() {
  RankPosition position;
  const auto now = progress_.get();
  position.step = now.step;
  position.where = now.where;
  position.plane_call = plane_call_;
  auto caller = caller_;
  std::erase_if(probes_, [&](const PositionBoard::Probe& probe) {
    auto group = probe();
    if (!group) {
      return true;
    }
    add_caller(caller, group->caller);
    position.groups.push_back(std::move(*group));
    return false;
  });
  position.one_thread = caller.has_value();
  return position;
}

std::optional<RankPosition> PositionWatch::look(SteadyTime steady) {
  if (steady < next_look_) {
    return std::nullopt;
  }
  next_look_ = steady + interval_;
  auto now = read_position();
  const bool stands = now.waits() && last_position_ == now;
  std::optional<RankPosition> message;
  if (stands && num_looks_stood_++ % kLooksPerMessage == 0) {
    message = now;
  } else if (!stands && std::exchange(num_looks_stood_, 0) > 0) {
    message.emplace();
  }
  last_position_ = std::move(now);
  return message;
}

}  // namespace ddp::detail
