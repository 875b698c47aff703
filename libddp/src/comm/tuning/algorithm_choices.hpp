// SPDX-License-Identifier: Apache-2.0
// The plan's entry for the fastest measured algorithms of convolutions and matrix products.
#pragma once

#include <string>

#include "core/files/plan.hpp"
#include "ops/shared/choice_book.hpp"

namespace ddp::detail {

/// The entry's name.
constexpr const char* kAlgorithmChoices = "kernels";

/// Writes {"requested operation": [proposed, chosen], …}.
std::string algorithm_choices_to_json(const ops::detail::MeasuredChoices& choices);
/// Throws ReadError if `json` is not such an entry.
ops::detail::MeasuredChoices algorithm_choices_from_json(const std::string& json);

/// Copies new choices of this process into `plan`. Called on the rank that writes the plan: ranks
/// choose independently until they adopt the same plan.
void save_algorithm_choices(Plan& plan);

}  // namespace ddp::detail
