// SPDX-License-Identifier: Apache-2.0
#pragma once

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

  std::string to_text() const;
  /// Throws ReadError.
  static Status parse(const std::string& text);

  /// The data for decisions: each distinct message once, from the first rank with it,
  /// with the slowest step and rank 0's pause. Omits records, which only rank 0 uses.
  static std::string to_digest(const std::vector<Status>& statuses);
  /// Decisions from the result equal those from the original statuses. Throws ReadError.
  static std::vector<Status> from_digest(const std::string& text);
};

}  // namespace ddp::detail
