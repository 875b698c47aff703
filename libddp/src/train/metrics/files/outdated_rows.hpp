// SPDX-License-Identifier: Apache-2.0
// Rows of an earlier start in a run folder, which a resumed run writes again. Torch-free.
#pragma once

#include <cstdint>
#include <string>

#include "train/metrics/files/run_folder.hpp"

namespace ddp::detail {

/// Removes the rows of `table` (CSV and JSONL) whose `column` is at least `first`, and an
/// unfinished last line. A file that loses rows is kept as it was (RunFolder::set_aside). Returns
/// whether a file lost rows.
bool remove_rows_from(RunFolder& folder, const std::string& table, const std::string& column,
                      int64_t first);

}  // namespace ddp::detail
