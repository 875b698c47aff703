// SPDX-License-Identifier: Apache-2.0
// The algorithms of convolutions and matrix products that were measured to be the fastest, as an
// entry of the plan.
#pragma once

#include <string>

#include "ddp/core/plan.hpp"
#include "ops/choice_book.hpp"

namespace ddp::detail {

/// The entry's name.
constexpr const char* kKernelChoices = "kernels";

/// {"what was asked": [proposed, chosen], …}
std::string kernel_choices_to_json(const ops::detail::MeasuredChoices& choices);
/// Throws ReadError where `json` is no such entry.
ops::detail::MeasuredChoices kernel_choices_from_json(const std::string& json);

/// Puts the process's choices into `plan`, where there are new ones. Of the rank that writes it:
/// ranks choose by themselves until they adopt the same plan.
void keep_kernel_choices(Plan& plan);

}  // namespace ddp::detail
