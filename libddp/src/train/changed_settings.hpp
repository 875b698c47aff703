// SPDX-License-Identifier: Apache-2.0
// Settings of a resumed run that differ from the saved run. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace ddp::detail {

/// Lists the settings that differ: "lr_schedule.lr=0.1, it had 0.5". All texts are
/// settings_yaml()'s; if one is not, the list is empty. Omitted are:
/// - sections about file locations and speed: checkpoint, metrics, context, data, loader;
/// - a key that only one of `saved` and `now` has (two versions of a program), if its value is the
///   one in `defaults`. A key missing in `defaults` is listed, because its default is unknown.
std::vector<std::string> changed_settings(const std::string& saved, const std::string& now,
                                          const std::string& defaults);

}  // namespace ddp::detail
