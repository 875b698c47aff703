// SPDX-License-Identifier: Apache-2.0
// Masks that mask nothing.
#pragma once

#include "export/fusion/fusion_graph.hpp"

namespace ddp::detail {

/// Whether each element of the value is known to be true, as in the mask that transformers makes
/// for a text without padding: arange(length) >= 0.
bool is_all_true(const FusionGraph& graph, const Argument* value);

}  // namespace ddp::detail
