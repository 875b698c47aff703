// SPDX-License-Identifier: Apache-2.0
// The background side of a control plane: serves the link, sends progress and positions, and runs
// the failure callbacks.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "core/control_link.hpp"
#include "core/event_loop.hpp"

namespace ddp::detail {

class PlaneService final : public EventLoop::Handler {
 public:
  PlaneService(RankState& state, ControlLink& link) : state_(state), link_(link) {}

  std::chrono::milliseconds prepare(std::vector<pollfd>& watched) override;
  void serve(std::unique_lock<std::mutex>& lock, const std::vector<pollfd>& watched,
             SteadyTime steady) override;
  void end_by_exception(const std::string& what) override;

 private:
  void log_first_cause() const;

  RankState& state_;
  ControlLink& link_;
};

}  // namespace ddp::detail
