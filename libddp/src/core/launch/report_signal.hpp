// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ddp::detail {

/// Whether SIGUSR2 came since the last call: rank 0 is to report on all ranks. Any thread.
bool take_report_request();

}  // namespace ddp::detail
