// SPDX-License-Identifier: Apache-2.0
// What the language models of this repository do with their weights before ops::linear(),
// lora_linear() and linear_cross_entropy() read them, and how their layers ask for a recomputation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ddp::ops {

/// Moves `parts`, which differ in the first dimension only, into one memory, where they follow each
/// other: the weights of layers that read the same input, for one product. Values, names and
/// gradients stay; a `.to()` separates them again. The parts get one version: a backward that reads
/// their joint memory refuses a change of any of them.
void join_rows(const std::vector<at::Tensor>& parts);
/// All rows of `parts`; after join_rows() without a copy. The gradient goes to the parts (at most
/// three).
at::Tensor joined_rows(const std::vector<at::Tensor>& parts);

/// Reallocates `weight` [rows, columns] with a multiple of 128 rows, the additional rows zero.
/// Keeps values, shape, name and gradient; results do not change. A `.to()` drops the padding.
void pad_rows(at::Tensor& weight);
/// `weight` with the rows added by pad_rows(), if any, sharing its memory, without gradient.
at::Tensor padded_rows(const at::Tensor& weight);

/// A frozen weight [out, in] in FP8 (e4m3), once for the forward and once for the backward, each
/// with a float32 scale per row of its matrix, which makes the row's largest magnitude 448.
struct Fp8Weight {
  at::Tensor values, scales;                        ///< float8_e4m3fn [out, in], float32 [out]
  at::Tensor transposed_values, transposed_scales;  ///< float8_e4m3fn [in, out], float32 [in]
};
Fp8Weight quantize_weight(const at::Tensor& weight);
/// Whether tensor cores of `device` multiply FP8 with a scale per row (CUDA 9.0).
bool multiplies_fp8(at::Device device);

/// A copy of weights in another form that captured CUDA graphs may read. A replay runs no code of
/// the host, so GraphedStep refreshes all copies before each step.
class WeightCopy {
 public:
  virtual ~WeightCopy() = default;
  /// If the weights have changed, converts them again into the same memory.
  virtual void refresh() = 0;
};
void register_weight_copy(const std::shared_ptr<WeightCopy>& copy);  ///< held weakly
void refresh_weight_copies();                                        ///< of the process

/// Call after a change that captured graphs lack and GraphedStep cannot detect: an adapter is
/// merged, or a copy has new memory. All GraphedSteps then drop their graphs.
void invalidate_graphs();
uint64_t graph_invalidations();  ///< the number of calls

/// True in `function` while checkpoint() runs it again: nobody reads the values of its result then,
/// and its last op may skip computing them (`skips_result` of linear() and lora_linear()).
bool is_recomputing();

}  // namespace ddp::ops
