// SPDX-License-Identifier: Apache-2.0
#include "ddp/data/tensor_dataset.hpp"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp {

namespace {

// Why a tensor cannot hold the samples of a data set, or an empty string.
std::string why_not(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "is undefined; fix: pass a tensor with values, for example of ddp::load_npy()";
  }
  if (!tensor.is_cpu()) {
    return "is on " + tensor.device().str() +
           "; fix: pass tensor.cpu(), because the loader copies batches to the GPU";
  }
  if (tensor.dim() == 0) {
    return "is a scalar; fix: pass tensors whose first dimension counts the samples";
  }
  return {};
}

void check_index(int64_t index, int64_t size) {
  if (index < 0 || index >= size) {
    throw SettingsError(concat("sample ", index, " does not exist: the data set has ", size,
                               "; fix: pass an index from 0 to ", size - 1));
  }
}

}  // namespace

TensorListDataset::TensorListDataset(std::vector<at::Tensor> tensors)
    : tensors_(std::move(tensors)) {
  if (tensors_.empty()) {
    throw SettingsError("a data set of tensors needs at least one tensor; fix: pass {x, y}");
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (const std::string reason = why_not(tensors_[i]); !reason.empty()) {
      throw SettingsError(concat("tensor ", i, " of a data set of tensors ", reason));
    }
    if (tensors_[i].size(0) != tensors_[0].size(0)) {
      throw SettingsError(concat("tensor 0 of a data set of tensors has ", tensors_[0].size(0),
                                 " samples and tensor ", i, " has ", tensors_[i].size(0),
                                 "; fix: pass tensors of equal first dimension, for example with "
                                 "tensor.narrow(0, 0, number)"));
    }
    tensors_[i] = tensors_[i].detach();  // batches need no autograd graph
  }
  size_ = tensors_[0].size(0);
}

std::vector<at::Tensor> TensorListDataset::get(int64_t index) const {
  check_index(index, size_);
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : tensors_) {
    rows.push_back(tensor.select(0, index));
  }
  return rows;
}

std::vector<at::Tensor> TensorListDataset::get_batch(const std::vector<int64_t>& indices) const {
  for (const int64_t index : indices) {
    check_index(index, size_);
  }
  const at::Tensor index = at::tensor(indices, at::kLong);
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : tensors_) {
    // LibTorch selects unsigned integers from matrices, but not from vectors.
    rows.push_back(tensor.dim() > 1 ? tensor.index_select(0, index)
                                    : tensor.unsqueeze(1).index_select(0, index).squeeze(1));
  }
  return rows;
}

Example TensorDataset::get(int64_t index) const {
  auto rows = rows_.get(index);
  return {std::move(rows[0]), std::move(rows[1])};
}

Batch TensorDataset::get_batch(const std::vector<int64_t>& indices) const {
  auto rows = rows_.get_batch(indices);
  return {std::move(rows[0]), std::move(rows[1])};
}

}  // namespace ddp
