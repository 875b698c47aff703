// SPDX-License-Identifier: Apache-2.0
// The control plane's collectives in progress, on rank 0: who has called with which values, and
// until when rank 0 waits for the others.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/control/hub/deadlock.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/control/wire/control_messages.hpp"

namespace ddp::detail {

/// The owner's mutex guards it.
class CollectiveRounds {
 public:
  /// A collective that every rank has called.
  struct Result {
    uint64_t sequence = 0;
    CollectiveKind kind = CollectiveKind::Barrier;
    uint32_t root = 0;
    std::vector<std::string> values;  ///< broadcast: the root's; gathers: all; else none
  };
  struct Outcome {
    std::optional<Result> result;
    std::string mismatch;  ///< the job's error if ranks called different collectives
  };

  /// `peers` names ranks and their progress in messages.
  CollectiveRounds(const PeerTable& peers, std::chrono::milliseconds timeout);

  /// Why no rank of this library would send this call now; empty if one would.
  std::string why_invalid(int rank, const Contribution& contribution) const;
  Outcome add(int rank, Contribution contribution, SteadyTime now);
  /// Returns the error of a collective that waited longer than the timeout; empty if none did.
  std::string find_overdue(SteadyTime now) const;
  /// Number of collectives that the rank has called.
  uint64_t num_calls(int rank) const { return num_calls_[static_cast<std::size_t>(rank)]; }
  /// Returns the rank's last call if it is incomplete.
  std::optional<PlaneCall> pending_call(int rank) const;

 private:
  struct Round {
    CollectiveKind kind = CollectiveKind::Barrier;
    uint32_t root = 0;
    std::string activity;
    int first_rank = 0;
    SteadyTime deadline{};
    std::vector<std::optional<std::string>> values;
    int num_arrived = 0;
  };

  std::size_t held_bytes(const std::string& value) const;
  std::string describe_mismatch(int rank, const Contribution& contribution,
                                const Round& round) const;

  const PeerTable& peers_;
  const std::chrono::milliseconds timeout_;
  std::map<uint64_t, Round> rounds_;         // by sequence number
  std::vector<uint64_t> num_calls_;          // by rank
  std::vector<std::size_t> num_held_bytes_;  // of incomplete collectives, by rank
};

}  // namespace ddp::detail
