// SPDX-License-Identifier: Apache-2.0
// Sparse gradients (ddp.sparse=gather): rows of an embedding, as COO tensors. They have no place in
// a bucket. At the end of a synchronised backward, after the buckets:
//
//   each rank    coalesces its rows of every sparse parameter
//   all-gather   of the numbers of rows, which the host reads
//   all-gather   of indices and values of each parameter, with these numbers
//   each rank    adds up the rows of all ranks in rank order, so all get the same bits, and divides
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/model_tensors.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp::detail {

class GradientArena;
struct ReducerParts;

/// Marks those of `trained` whose gradients are gathered: in ModelTensors::sparse_parameters. Empty
/// without ddp.sparse=gather. Throws SettingsError for names that are no parameters, for scalars,
/// float16 and bfloat16.
std::vector<bool> find_sparse(const NamedParameters& trained, const ModelTensors& tensors,
                              const DdpOptions& options);

/// The indices of the sparse parameters.
std::vector<int> sparse_indices(const GradientArena& gradients);
/// Throws SettingsError if .grad of parameter `index` is not dense, or of a sparse parameter not
/// rows.
void check_layout(const ReducerParts& parts, int index);
/// Throws SettingsError in a capture, and for a sparse parameter that several wrapped models own.
void refuse_uses_of_sparse(const ReducerParts& parts);

/// Drops the sparse parameters' .grad. After a backward that threw it may have any layout, and this
/// rank has to take part in finish_reductions().
void drop_sparse(const GradientArena& gradients);
/// Waits for the buckets and leaves the mean of each used sparse parameter in its slot. Returns
/// which parameters any rank used. Collective; with sparse parameters the host waits for the
/// numbers of rows. If a hook throws on this rank, the others still get its rows. If .grad of one
/// rank is not rows, all ranks throw SettingsError.
std::vector<bool> finish_reductions(ReducerParts& parts);

}  // namespace ddp::detail
