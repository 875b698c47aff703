// SPDX-License-Identifier: Apache-2.0
// What the ranks of a Checkpointer send each other. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/file_ops.hpp"
#include "core/first_failure.hpp"
#include "core/message_codec.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// One rank's writing thread.
struct WriterStatus {
  enum class State { Resting, Running, Failed };
  State state = State::Resting;
  std::string error = {};                ///< why the writer failed
  std::vector<FileRecord> records = {};  ///< files written
  std::string not_finite = {};           ///< why the saved state is not finite

  friend auto message_fields(WriterStatus& s) {
    return std::tie(s.state, s.error, s.records, s.not_finite);
  }
};

/// One rank's message in an exchange.
struct RankStatus {
  bool stop = false;
  bool due_by_time = false;  ///< rank 0's clock
  double step_seconds = 0;
  double pause_seconds = 0;  ///< until the next exchange; rank 0's counts
  WriterStatus writer = {};

  friend auto message_fields(RankStatus& s) {
    return std::tie(s.stop, s.due_by_time, s.step_seconds, s.pause_seconds, s.writer);
  }
};

/// What decisions need of all ranks' statuses: each different status once, from the first rank that
/// has it, with the slowest step and rank 0's pause. It has no records, which rank 0 alone uses.
struct StatusDigest {
  std::size_t world_size = 0;
  std::vector<std::pair<std::size_t, RankStatus>> first_with;  ///< rank, status

  static StatusDigest of(const std::vector<RankStatus>& statuses);
  /// Decide as the statuses it was made from.
  std::vector<RankStatus> statuses() const;
  friend auto message_fields(StatusDigest& digest) {
    return std::tie(digest.world_size, digest.first_with);
  }
};

/// Gathers all statuses on rank 0 and broadcasts their digest: returns the statuses on rank 0, the
/// digest's on other ranks. Collective.
std::vector<RankStatus> exchange_statuses(ControlPlane& control_plane, const RankStatus& own);

double slowest_step(const std::vector<RankStatus>& statuses);

/// Rank 0's value on every rank. Where `make` throws an Error on rank 0, every rank throws one of
/// the same exit code. Collective.
template <typename F>
auto broadcast_from_main(ControlPlane& control_plane, F&& make) {
  using Value = decltype(make());
  std::tuple answer{Value(), ExitCode::Ok, std::string()};
  if (control_plane.rank() == 0) {
    try {
      std::get<0>(answer) = make();
    } catch (const Error& error) {
      std::get<1>(answer) = error.exit_code();
      std::get<2>(answer) = error.what();
    }
  }
  const auto [value, exit_code, message] = broadcast_message(control_plane, answer);
  if (exit_code != ExitCode::Ok) {
    FailureCause cause;
    cause.message = message;
    cause.exit_code = exit_code;
    throw_failure(cause);
  }
  return value;
}

}  // namespace ddp::detail
