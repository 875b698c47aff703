// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ddp/core/safetensors.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// Puts the weights of each recurrent layer (aten::lstm, gru, rnn_tanh, rnn_relu) on a GPU into one
/// memory in the order of cuDNN, which else copies them in each call. Python's modules do so when
/// they move (RNNBase.flatten_parameters). `tensors` has the parameters by name.
void join_recurrent_weights(const ExportedProgram& program, const TensorMap& tensors);

}  // namespace ddp::detail
