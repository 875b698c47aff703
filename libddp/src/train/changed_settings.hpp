// SPDX-License-Identifier: Apache-2.0
// What a resumed run sets otherwise than the run that saved. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace ddp::detail {

/// Lists the settings that differ: "lr_schedule.lr=0.1, it had 0.5". All texts are
/// settings_yaml()'s; the list is empty where one is not. Left out are:
/// - the sections that say where files lie and how fast the run goes: checkpoint, metrics, context,
///   data, loader;
/// - a key that only one of `saved` and `now` has, as two versions of a program do, where its value
///   is the one in `defaults`. A key that `defaults` does not have is listed: nobody knows whether
///   its value was the default.
std::vector<std::string> changed_settings(const std::string& saved, const std::string& now,
                                          const std::string& defaults);

}  // namespace ddp::detail
