// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "export/fusion/graph_memory.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// A value that is only cut into its parts by `x[0], x[1], x[2]`, such as query, key and value of
/// one product, becomes one call. The backward then stacks the gradients of the parts once. For
/// each part alone it fills a gradient of the whole value with zeros, and sums these. Returns the
/// number of values.
int join_selections(Graph& graph, const GraphMemory& memory);

}  // namespace ddp::detail
