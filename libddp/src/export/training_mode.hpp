// SPDX-License-Identifier: Apache-2.0
// The other mode of a program that was exported in one.
#pragma once

#include "export/graph.hpp"

namespace ddp::detail {

/// Whether an operator of the graph is in training mode. `otherwise` is the answer for a graph
/// without operators that have a mode.
bool is_training_graph(const Graph& graph, bool otherwise);

/// The program with the mode of every operator changed: dropout, batch and instance normalization,
/// the dropout of attention and of recurrent layers, rrelu. A batch normalization counts its
/// batches in training only. Throws SettingsError naming the node if the archive does not say what
/// the other mode does:
/// - eval(): a random operator without a mode, or a buffer that the program updates itself, may
///   belong to training only;
/// - train(): attention whose probability of dropout was 0, operators that only evaluate, and a
///   program without an operator that has a mode.
ExportedProgram with_mode(ExportedProgram program, bool training);

}  // namespace ddp::detail
