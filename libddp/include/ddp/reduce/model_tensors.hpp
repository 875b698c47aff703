// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ddp/core/state_dict.hpp"

namespace ddp {

/// What DataParallelModel needs to know about a model. The std::function members may be empty.
struct ModelTensors {
  NamedParameters parameters = {};  ///< in registration order, also frozen parameters
  NamedParameters buffers = {};     ///< in registration order
  std::function<NamedParameters()> read_buffers = {};  ///< for modules that replace buffers
  /// The module's parameters now, shared ones under each name. A save refuses those that were
  /// registered too late, and Muon leaves a weight to AdamW by any of its names.
  std::function<NamedParameters()> read_parameters = {};
  std::function<bool()> is_training{};         ///< empty: always in training mode
  std::function<uint64_t()> training_modes{};  ///< hash of all submodules' training flags
  bool has_collective_forward = false;         ///< the model contains a SyncBatchNorm
  /// Names of parameters whose gradients are sparse, for ddp.sparse=gather. Those of
  /// torch::nn::Embedding and EmbeddingBag with sparse(true) are found in torch::nn modules.
  std::vector<std::string> sparse_parameters = {};
};

}  // namespace ddp
