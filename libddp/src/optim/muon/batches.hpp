// SPDX-License-Identifier: Apache-2.0
// Which parameters Muon updates, in which batches, and which rank updates which batch. All of it
// follows from the model and the settings alone, so it is equal on all ranks. Batches do not depend
// on the number of ranks either, and so neither do the bits of an update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/optim/make_optimizer.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"

namespace ddp::detail {

/// The parameters of an optimizer, divided by the rule that updates them. Both keep their order.
struct MuonSplit {
  std::vector<ParameterSettings> matrices;  ///< updated by Muon
  std::vector<ParameterSettings> rest;      ///< updated by AdamW
};

/// Muon takes parameters with two or more dimensions of which no name matches one of
/// MuonOptions::adamw_parameters. Throws SettingsError if there is none, and for settings that
/// contradict Muon.
MuonSplit split_for_muon(const std::vector<ParameterSettings>& parameters,
                         const OptimizerOptions& options);

/// What the split chose, as one line of the log.
std::string describe(const MuonSplit& split);

/// Parameters with more than two dimensions are matrices [dim 0, all others].
int64_t rows_of(const at::Tensor& parameter);
int64_t cols_of(const at::Tensor& parameter);

/// Matrices that are updated together, as one tensor [members, rows, cols] with rows <= cols. A
/// parameter with more rows than columns lies transposed in it.
struct MuonBatch {
  int64_t rows = 0;
  int64_t cols = 0;
  double lr_scale = 1.0;
  double weight_decay = 0.0;
  double factor = 1.0;  ///< of the learning rate (MuonOptions::scale)
  at::Device device = at::kCPU;
  at::ScalarType leaf_dtype = at::kFloat;
  at::ScalarType dtype = at::kFloat;  ///< of masters and momentum: float32, or float64 as leaves
  std::vector<ParameterState> members = {};  ///< slots: the momentum
  int owner = 0;                             ///< rank that updates the batch
  at::Tensor momentum = {};                  ///< undefined before the first gradient
  at::Tensor masters = {};                   ///< of half leaves

  /// Member `i` of `batch`, which has the batch's shape, in the parameter's own shape.
  at::Tensor view(const at::Tensor& batch, size_t i) const;
  /// An uninitialized tensor of the batch's shape.
  at::Tensor empty() const;
};

/// Matrices of one shape, dtype, device, group and factor share a batch, small ones up to a limit
/// of elements that large ones exceed alone.
std::vector<MuonBatch> make_batches(const std::vector<ParameterSettings>& matrices,
                                    const MuonOptions& options);

/// Sets the owners: the most expensive batch first, each to the rank with the least work so far.
void assign_owners(std::vector<MuonBatch>& batches, int world_size);

}  // namespace ddp::detail
