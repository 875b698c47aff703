// SPDX-License-Identifier: Apache-2.0
// The report of all ranks that rank 0 makes on request and when the job fails: one verdict, and one
// JSON file.
//
// The file is DDP_DOCTOR_FILE if this environment variable of rank 0 is set, else doctor.json in
// the run folder. Without both there is no file, and a requested report is logged instead, one line
// a rank. A later report of the run replaces the file.
#pragma once

#include <string>
#include <vector>

#include "core/control/doctor/diagnosis.hpp"
#include "core/control/failure/failure_cause.hpp"

namespace ddp::detail {

struct JobReport {
  std::vector<RankEvidence> evidence;  ///< by rank
  std::optional<FailureCause> cause;   ///< of the failure; nothing: requested
  Verdict verdict;
};

/// Where later reports of this process are written; a run folder calls it.
void set_report_file(const std::string& path);

/// The report's JSON text.
std::string to_json(const JobReport& report);

/// Logs the verdict, and writes the file or logs one line a rank. A requested verdict is always
/// logged. That of a failure is logged where the first cause does not say as much. Waits for the
/// file systems of the log and the file, and throws the errors of the file.
void publish_report(const JobReport& report);

}  // namespace ddp::detail
