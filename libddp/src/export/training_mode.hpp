// SPDX-License-Identifier: Apache-2.0
// The other mode of a program that was exported in one.
#pragma once

#include "export/graph.hpp"

namespace ddp::detail {

/// Whether an operator of the graph is in training mode. `otherwise` is the answer for a graph
/// without operators that have a mode.
bool is_training_graph(const Graph& graph, bool otherwise);

/// The program with every operator's mode changed: dropout, batch and instance normalization, the
/// dropout of attention and of recurrent layers, rrelu. Batch normalization counts its batches in
/// training only. Throws SettingsError naming the node if the change cannot be known: a random
/// operator that eval() may have to leave out, or buffers that the graph updates itself.
ExportedProgram in_other_mode(ExportedProgram program, bool training);

}  // namespace ddp::detail
