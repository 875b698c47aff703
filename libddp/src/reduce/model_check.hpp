// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp::detail {

/// Compares model and settings over the ranks before any gradient moves: all ranks throw
/// MismatchError with the first difference, both sides shown. Collective.
void check_equal_across_ranks(Communicator& communicator, const ModelTensors& tensors,
                              const DdpOptions& options);

/// Throws SettingsError naming the first tensor that cannot be kept in step: expanded or complex
/// tensors, and parameters that an operation computed. Alike on all ranks whose models are equal.
void check_supported(const ModelTensors& tensors);

}  // namespace ddp::detail
