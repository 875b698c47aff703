// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/error.hpp"

namespace ddp {
namespace detail {

/// " at step 41", " before the first step" (-1), " at an unknown step (call
/// Context::set_progress)" (kUnknownStep).
std::string step_words(int64_t step);
/// " at step 41 in backward"; without a place only the step.
std::string place_words(int64_t step, const std::string& where);
/// "rank 2 (node3)"; without a host "rank 2".
std::string rank_words(int64_t rank, const std::string& host);

}  // namespace detail

/// The cause of the job's failure, as reported by the first rank that knew.
struct FailureCause {
  int64_t generation = 0;  ///< whose failure it is; its control plane sets it
  int rank = -1;           ///< in that generation
  std::string host;
  int64_t step = -1;                        ///< -1 before the first step; or kUnknownStep
  std::string where;                        ///< bucket or module, if known
  std::string message;                      ///< the original message
  ExitCode exit_code = ExitCode::PeerLost;  ///< 1 … 255: a failed job never ends with 0

  /// Whether another rank may have sent it.
  bool is_valid() const;
  /// "rank 2 (node3) failed at step 41 in bucket 3: out of memory". Names a later generation than
  /// the first.
  std::string to_line() const;
};

}  // namespace ddp
