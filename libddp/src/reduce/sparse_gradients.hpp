// SPDX-License-Identifier: Apache-2.0
// Sparse gradients (ddp.sparse=gather): rows of an embedding, as COO tensors. They have no place in
// a bucket. At the end of a synchronised backward, after the buckets:
//
//   each rank    coalesces its rows of every sparse parameter
//   all-gather   of the numbers of rows, which the host reads
//   all-gather   of indices and values of each parameter, with these numbers
//   each rank    coalesces the rows of all ranks in rank order, so all get the same bits, and
//   divides
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp::detail {

class GradientArena;
struct ReducerParts;

/// Marks the parameters whose gradients are gathered: those named in `sparse`. Empty without
/// ddp.sparse=gather. Throws SettingsError for float16 and bfloat16.
std::vector<bool> find_sparse(const NamedParameters& parameters,
                              const std::vector<std::string>& sparse, const DdpOptions& options);

bool any_is_sparse(const GradientArena& gradients);
/// Throws SettingsError if .grad of parameter `index` is not dense, or of a sparse parameter not
/// rows.
void check_layout(const ReducerParts& parts, int index);
/// Throws SettingsError in a capture, and for a sparse parameter that several wrapped models own.
void refuse_uses_of_sparse(const ReducerParts& parts);

/// Leaves the mean of each sparse parameter in its slot, if `used` on any rank. Does nothing
/// without sparse parameters. Collective; the host waits for the numbers of rows.
void reduce_sparse(ReducerParts& parts, const std::vector<bool>& used);

}  // namespace ddp::detail
