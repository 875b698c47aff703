// SPDX-License-Identifier: Apache-2.0
// Collectives that one communicator called and that have not ended, to report this rank's position.
// Free of LibTorch and MPI.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "comm/progress_engine.hpp"
#include "core/rank_position.hpp"

namespace ddp::detail {

class CallLog {
 public:
  /// `id`: see GroupPosition.
  explicit CallLog(std::string id) : id_(std::move(id)) {}

  /// Any thread, in call order.
  void add(std::string operation, std::shared_ptr<ProgressTicket> ticket) {
    const std::lock_guard lock(mutex_);
    add_caller(caller_);
    drop_ended();
    calls_.push_back({++num_called_, std::move(operation), std::move(ticket)});
  }

  /// Id of the group that the next collective, a split with this color, makes.
  std::string id_of_child(int color) {
    const std::lock_guard lock(mutex_);
    return id_ + "/" + std::to_string(num_called_) + ":" + std::to_string(color);
  }

  GroupPosition look() {
    const std::lock_guard lock(mutex_);
    drop_ended();
    GroupPosition position{.id = id_, .num_called = num_called_, .caller = caller_};
    for (const auto& call : calls_) {
      if (call.ticket->is_finished()) {
        continue;
      }
      if (position.pending == 0) {
        position.pending = call.number;
        position.operation = call.operation;
      }
      if (call.ticket->is_waited_for()) {
        position.waited = call.number;
      }
    }
    return position;
  }

 private:
  struct Call {
    uint64_t number;
    std::string operation;
    std::shared_ptr<ProgressTicket> ticket;
  };

  void drop_ended() {
    while (!calls_.empty() && calls_.front().ticket->is_finished()) {
      calls_.pop_front();
    }
  }

  const std::string id_;
  std::mutex mutex_;
  uint64_t num_called_ = 0;
  CallerThread caller_ = std::thread::id();
  std::deque<Call> calls_;
};

}  // namespace ddp::detail
