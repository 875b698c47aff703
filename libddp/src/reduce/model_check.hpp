// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp::detail {

/// Compares model and settings over the ranks before any gradient is sent. All ranks throw
/// MismatchError with both sides of the first difference. Collective.
void check_equal_across_ranks(Communicator& communicator, const ModelTensors& tensors,
                              const DdpOptions& options);

/// Throws SettingsError naming the first unsupported tensor: expanded or complex tensors, and
/// parameters computed by an operation. All ranks with equal models decide alike.
void check_supported(const ModelTensors& tensors);

}  // namespace ddp::detail
