// SPDX-License-Identifier: Apache-2.0
// Taps of 3x3 filters that all ranks leave alone: what an optimizer may leave behind, and what need
// not be reduced.
#pragma once

#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "ddp/ops/filter_taps.hpp"

namespace ddp::detail {

bool is_3x3_filter(const at::Tensor& tensor);

/// Of each filter the taps that any rank has in `own`; all ranks give as many. Collective; the host
/// waits.
std::vector<ops::Taps> taps_of_any_rank(Communicator& communicator,
                                        const std::vector<ops::Taps>& own);

/// For a rank that reads taps of `name` which all had left alone; `consequence` is why that cannot
/// be, `where` (optional) completes the way out.
SettingsError late_taps_error(const std::string& name, const std::string& consequence,
                              const std::string& where = "");

}  // namespace ddp::detail
