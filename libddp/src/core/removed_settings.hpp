// SPDX-License-Identifier: Apache-2.0
// Settings of earlier versions. A file that still sets one gets an error with its name.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace ddp::detail {

constexpr std::array<std::string_view, 2> kRemovedSettings = {"optimizer.overlap_backward",
                                                              "optimizer.skip_dead_taps"};

constexpr bool is_removed_setting(std::string_view key) {
  return std::find(kRemovedSettings.begin(), kRemovedSettings.end(), key) != kRemovedSettings.end();
}

}  // namespace ddp::detail
