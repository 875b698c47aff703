// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "train/checkpoint_impl.hpp"

namespace ddp::detail {

/// One rank's word in an exchange.
struct CheckpointerImpl::Status {
  enum class Writer { Resting, Running, Failed };
  bool stop = false;
  bool due_by_time = false;  ///< rank 0's clock
  double step_seconds = 0;
  double pause_seconds = 0;  ///< until the next exchange; rank 0's counts
  Writer writer = Writer::Resting;
  std::string error = {};                ///< where the writer failed
  std::vector<FileRecord> records = {};  ///< what it wrote
  std::string not_finite = {};           ///< why that is not finite

  std::string to_text() const;
  /// Throws ReadError.
  static Status parse(const std::string& text);

  /// Of all ranks what decisions need: each different word once, from the first rank that says it,
  /// with the slowest step and rank 0's pause. Without records, which rank 0 alone uses.
  static std::string to_digest(const std::vector<Status>& statuses);
  /// Decides as the statuses it was made from. Throws ReadError.
  static std::vector<Status> from_digest(const std::string& text);
};

}  // namespace ddp::detail
