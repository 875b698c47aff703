// SPDX-License-Identifier: Apache-2.0
// The ways to train that libddp-selftest compares with one process.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "ddp/ddp.hpp"
#include "support/exact_model.hpp"

namespace selftest {

using Model = ddp::DistributedDataParallel<ddp::exact::Mlp>;

constexpr int64_t kNumSteps = 8;         ///< of each mode; on a GPU the last ones replay a graph
constexpr double kLr = 1.0 / (1 << 4);   ///< powers of two: products with them are exact
constexpr double kMomentum = 1.0 / 2.0;  ///< of both optimizers

/// The batch `part` of rank `rank`: [num_rows, 4], on this rank's device.
torch::Tensor rows_of(const ddp::Context& context, int rank, int64_t part, int64_t num_rows = 4);

/// One way to train, and what one process computes with the batches of all ranks.
struct Mode {
  std::string name;
  std::string says;  ///< what a user has if it passes
  ddp::DdpOptions ddp{};
  bool zero1 = false;
  torch::Dtype dtype = torch::kFloat;
  int64_t width = 5;  ///< of the model
  /// Relative to the largest element of a tensor; 0: equal bits, if sums over the ranks are exact.
  double tolerance = 0;
  bool is_uneven = false;    ///< inside ddp::join, num_batches_of() the rank
  bool is_captured = false;  ///< a GraphedStep on rows_of(context, rank, step)
  /// Forward and backward of this rank. Not used if is_captured.
  std::function<void(Model& model, int64_t step)> backward{};
  /// Its gradient is the expected one.
  std::function<torch::Tensor(ddp::exact::Mlp& plain, int64_t step)> loss{};
};

/// Every mode with steps of an optimizer.
std::vector<Mode> make_modes(const ddp::Context& context);
/// Of a rank in an uneven mode.
int64_t num_batches_of(int rank);

}  // namespace selftest
