// SPDX-License-Identifier: Apache-2.0
// Tensors as a data set, and NumPy's files as tensors.
//
//   auto dataset = std::make_shared<ddp::TensorDataset>(ddp::load_npy("images.npy"),
//                                                       ddp::load_npy("labels.npy"));
//   ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
//   auto [images, labels] = loader.next();  // a ddp::Batch
//
// The tensors of ddp::load_safetensors() serve as well.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/data/dataset.hpp"

namespace ddp {

/// Maps the file and returns a CPU tensor over its pages, which stay mapped while a view lives. The
/// ranks of a host share the pages, and the system reads the pages that are used (of bool arrays:
/// all). Shortening the file meanwhile raises SIGBUS. Writing to the tensor does not change the
/// file. Fortran order becomes strides.
/// Formats 1.0 to 3.0; bool, (u)int8..64, float16..64 and complex64..128, little-endian. Otherwise
/// throws DataError naming file, reason and fix.
at::Tensor load_npy(const std::string& path);

/// Sample i has row i of each tensor, a view of that tensor's memory. A batch has one tensor [N, …]
/// for each, a copy.
class TensorListDataset {
 public:
  /// Throws SettingsError for tensors whose first dimensions differ or that are not on the CPU.
  explicit TensorListDataset(std::vector<at::Tensor> tensors);
  int64_t size() const { return size_; }             ///< rows of each tensor
  std::vector<at::Tensor> get(int64_t index) const;  ///< views
  std::vector<at::Tensor> get_batch(const std::vector<int64_t>& indices) const;  ///< copies

 private:
  std::vector<at::Tensor> tensors_;
  int64_t size_ = 0;
};

/// The same for two tensors, with named fields.
class TensorDataset {
 public:
  /// Throws as TensorListDataset.
  TensorDataset(const at::Tensor& data, const at::Tensor& target) : rows_({data, target}) {}
  int64_t size() const { return rows_.size(); }                ///< rows of each tensor
  Example get(int64_t index) const;                            ///< views
  Batch get_batch(const std::vector<int64_t>& indices) const;  ///< copies

 private:
  TensorListDataset rows_;
};

}  // namespace ddp
