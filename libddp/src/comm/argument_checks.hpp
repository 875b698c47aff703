// SPDX-License-Identifier: Apache-2.0
// Checks of tensor arguments for all backends. A wrong argument is an error on its own rank, not a
// hang on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Each check throws SettingsError naming the operation, the value and the allowed values.
void check_all_reduce(const Communicator& group, const at::Tensor& tensor, ReduceOp op);
void check_broadcast(const Communicator& group, const at::Tensor& tensor, int root);
void check_reduce_scatter(const Communicator& group, const at::Tensor& output,
                          const at::Tensor& input, ReduceOp op);
void check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input);
void check_reduce(const Communicator& group, const at::Tensor& tensor, int root, ReduceOp op);
/// For the form with `sizes`.
void check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                      at::IntArrayRef sizes);
void check_all_to_all(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                      at::IntArrayRef output_sizes, at::IntArrayRef input_sizes);
void check_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                  int root);
void check_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                   int root);
/// `operation` is "send" or "recv".
void check_peer(const Communicator& group, const char* operation, const at::Tensor& tensor,
                int peer);

/// Layout, device and dtype of a tensor that may have gaps in memory.
void check_any_strides(const Communicator& group, const char* operation, const char* name,
                       const at::Tensor& tensor);
/// One number of rows for each rank, 0 or more.
void check_sizes(const Communicator& group, const char* operation, const char* name,
                 at::IntArrayRef sizes);

/// Number of elements in a row of dimension 0.
int64_t row_elements(const at::Tensor& tensor);

/// Whether `part` is this rank's own part of `whole` (the in-place forms).
bool is_own_part(const at::Tensor& whole, const at::Tensor& part, int rank);

}  // namespace ddp::detail
