// SPDX-License-Identifier: Apache-2.0
// The plan's entry for the fastest measured algorithms of convolutions and matrix products.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "ops/choice_book.hpp"

namespace ddp::detail {

/// Name of the entry.
constexpr const char* kKernelChoices = "kernels";

/// {"requested operation": [proposed, chosen], …}
std::string kernel_choices_to_json(const ops::detail::MeasuredChoices& choices);
/// Throws ReadError if `json` is not such an entry.
ops::detail::MeasuredChoices kernel_choices_from_json(const std::string& json);

/// Copies new choices of this process into `plan`. Called on the rank that writes the plan: ranks
/// choose independently until they adopt the same plan.
void keep_kernel_choices(Plan& plan);

}  // namespace ddp::detail
