// SPDX-License-Identifier: Apache-2.0
// The hang doctor: from the reports of all ranks to one sentence that names the rank that the
// others wait for, and why. A pure function. Unlike find_deadlock() it also says what is only
// likely, so its verdict alone ends no job.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/control/doctor/rank_report.hpp"
#include "core/control/hub/deadlock.hpp"
#include "core/control/rank_reports.hpp"

namespace ddp::detail {

/// What rank 0 knows of a rank when it makes a report.
struct RankEvidence {
  std::string host = {};
  uint32_t process = 0;                   ///< id on its host
  bool is_connected = true;               ///< its control connection is open
  std::optional<RankReport> report = {};  ///< nothing: it did not answer
  Progress last = {};                     ///< as last known
  std::chrono::milliseconds silence{0};   ///< since its last message
  std::chrono::milliseconds waited{0};    ///< since it reported its position
  char process_state = 0;                 ///< of /proc on rank 0's host; 0: unknown
  std::optional<PlaneCall> call = {};     ///< see RankSnapshot
  uint64_t num_calls = 0;                 ///< see RankSnapshot
};

enum class VerdictKind {
  NothingCertain,  ///< no rank explains the wait, or no rank waits
  Absent,          ///< ranks did not enter the collective that others wait in
  Left,            ///< the same, and they end their context
  Frozen,          ///< the same: they compare a parameter that only they froze or unfroze
  Computes,        ///< the same, and they use a processor: not a hang yet
  OtherOperation,  ///< ranks are in different operations
  OtherSize,       ///< in the same operation with another size, dtype or root
  OtherOrder,      ///< in the same operations in another order
  OtherGraph,      ///< in different CUDA graphs
  Stopped,         ///< a process does not run
  DeadLink,        ///< a host, or data between ranks, does not arrive
  Lost             ///< a rank ended or vanished
};
const char* to_string(VerdictKind kind);

struct Verdict {
  VerdictKind kind = VerdictKind::NothingCertain;
  bool is_certain = false;      ///< prove_deadlock() finds the same
  std::vector<int> ranks = {};  ///< that the others wait for, or that differ from the others
  std::string text = {};        ///< one sentence
  std::string group = {};       ///< id of the communicator; empty: of none
};

struct DiagnosisLimits {
  /// Shorter waits do not count: ranks of a running job always wait for a moment.
  std::chrono::milliseconds min_wait{0};
  /// A rank that does not answer is only late until it was silent for longer.
  std::chrono::milliseconds min_silence{0};
};

/// `evidence`: by rank.
Verdict diagnose(const std::vector<RankEvidence>& evidence, const DiagnosisLimits& limits = {});

}  // namespace ddp::detail
