// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/failure_box.hpp"
#include "core/message_codec.hpp"
#include "train/checkpoint_impl.hpp"

namespace ddp::detail {

/// One rank's message in an exchange.
struct CheckpointerImpl::Status {
  enum class Writer { Resting, Running, Failed };
  bool stop = false;
  bool due_by_time = false;  ///< rank 0's clock
  double step_seconds = 0;
  double pause_seconds = 0;  ///< until the next exchange; rank 0's counts
  Writer writer = Writer::Resting;
  std::string error = {};                ///< why the writer failed
  std::vector<FileRecord> records = {};  ///< files written
  std::string not_finite = {};           ///< why the saved state is not finite

  friend auto message_fields(Status& s) {
    return std::tie(s.stop, s.due_by_time, s.step_seconds, s.pause_seconds, s.writer, s.error,
                    s.records, s.not_finite);
  }
};

/// What decisions need of all ranks' statuses: each different status once, from the first rank that
/// has it, with the slowest step and rank 0's pause. It has no records, which rank 0 alone uses.
struct CheckpointerImpl::Digest {
  std::size_t world_size = 0;
  std::vector<std::pair<std::size_t, Status>> first_with;  ///< rank, status

  static Digest of(const std::vector<Status>& statuses);
  /// Decide as the statuses it was made from.
  std::vector<Status> statuses() const;
  friend auto message_fields(Digest& digest) {
    return std::tie(digest.world_size, digest.first_with);
  }
};

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
