// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "export/fusion/graph_memory.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// The operator whose first result is a row of x, and on the CPU x itself.
inline constexpr const char* kNarrowToRow = "torch.ops.libddp.narrow_to_row.default";

/// A classifier reads one row of its last layers, often that of the class token, and the program
/// computes them for all rows. On CUDA the row is now selected before these operators. On the CPU
/// all rows stay, because a product of fewer rows may round differently. Returns the number of
/// selections. `memory` is that of the graph; afterwards it has to be found out again.
int select_rows_early(Graph& graph, const GraphMemory& memory);

}  // namespace ddp::detail
