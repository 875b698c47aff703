// SPDX-License-Identifier: Apache-2.0
// Collectives that autograd differentiates, as those of torch.distributed.nn.functional.
// docs/semantics_collectives.md names the differences.
//
//   // Each rank compares its own rows with those of all ranks.
//   const auto keys = ddp::all_gather_with_grad(embeddings, ctx.communicator());
//   const auto loss = torch::cross_entropy_loss(embeddings.mm(keys.t()) / 0.1, own_rows);
//   loss.backward();
//
// - Every rank differentiates its own loss. Its gradients are those of the sum of all ranks'
//   losses, as one process would compute them.
// - DistributedDataParallel then averages. The result is the gradient of the mean of the ranks'
//   losses, so no factor is missing: write losses whose mean over the ranks is the loss you want.
// - The backward of each call is a collective too. Backwards run in the reverse order of the calls.
//   So all ranks make the same calls in the same order, from one thread, and either all or none of
//   them need the gradient of a call's result. Otherwise results can be wrong without a word,
//   unless check_collectives is on. docs/semantics_collectives.md has the rules.
// - Inputs have any strides and any dtype of a Communicator. Results are contiguous. Derivatives
//   may be differentiated again. Without grad mode, or if `input` requires no gradient, only the
//   forward runs. CUDA graphs capture forward and backward.
// - Each call waits for its result, so SettingsError is thrown inside a GroupScope, and on several
//   ranks inside join(model, loop).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "ddp/comm/communicator.hpp"

namespace ddp {

/// Concatenates the tensors of all ranks along dimension 0, in rank order. The result of 0-dim
/// tensors is [world_size]. With `sizes` rank r has `sizes[r]` rows; without, all ranks have equal
/// shapes. Backward: a reduce-scatter (with `sizes`: an all-to-all) that sums.
at::Tensor all_gather_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                at::IntArrayRef sizes = {});

/// Returns the reduced tensor and leaves `input` as it is. Backward: the same all-reduce of the
/// gradients. Throws SettingsError for other operations than Sum and Avg.
at::Tensor all_reduce_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                ReduceOp op = ReduceOp::Sum);

/// Returns this rank's rows of the reduced tensor: [rows / world_size, …] of [rows, …]. Backward:
/// an all-gather, divided by the world size for Avg. Operations as for all_reduce_with_grad().
at::Tensor reduce_scatter_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                    ReduceOp op = ReduceOp::Sum);

/// Sends part r of the rows to rank r, and returns the parts from all ranks in rank order. The
/// parts are equal, or have the sizes of Communicator::all_to_all(). Backward: the reverse
/// all-to-all.
at::Tensor all_to_all_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                at::IntArrayRef output_sizes = {},
                                at::IntArrayRef input_sizes = {});

}  // namespace ddp
