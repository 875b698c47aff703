// SPDX-License-Identifier: Apache-2.0
#include "tensors/tensor_files.hpp"

#include <torch/torch.h>

#include <algorithm>

#include "common/data_path.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/detail/text.hpp"

namespace examples {
namespace {

using ddp::concat;
using ddp::DataError;
using ddp::detail::printable;

ddp::TensorMap read(const std::string& path) {
  auto tensors = ddp::load_safetensors(path).tensors;
  if (tensors.empty()) {
    throw DataError(path + " has no tensor");
  }
  for (const auto& [name, tensor] : tensors) {
    if (tensor.dim() == 0 || tensor.size(0) != tensors.begin()->second.size(0)) {
      throw DataError(concat(path, ": tensor ", printable(name), " has the shape ", tensor.sizes(),
                             ", but ", printable(tensors.begin()->first), " has ",
                             tensors.begin()->second.sizes(),
                             "; fix: give all tensors one row per sample"));
    }
  }
  return tensors;
}

// Checks that both files have the same tensors, but for the number of rows.
void require_same_tensors(const ddp::TensorMap& train, const ddp::TensorMap& eval,
                          const std::string& eval_path) {
  for (const auto& [name, tensor] : eval) {
    if (train.count(name) == 0) {
      throw DataError(
          concat(eval_path, " has the tensor ", printable(name), ", which tensors.path lacks"));
    }
  }
  for (const auto& [name, tensor] : train) {
    const auto found = eval.find(name);
    if (found == eval.end()) {
      throw DataError(concat(eval_path, " lacks the tensor ", printable(name)));
    }
    if (found->second.dim() != tensor.dim() || found->second.dtype() != tensor.dtype()) {
      throw DataError(concat(eval_path, ": tensor ", printable(name), " is ",
                             found->second.scalar_type(), ' ', found->second.sizes(), ", but ",
                             tensor.scalar_type(), ' ', tensor.sizes(), " in tensors.path"));
    }
  }
}

// Moves the last rows of each tensor to the result.
ddp::TensorMap take_last_rows(ddp::TensorMap& train, int64_t num_rows) {
  ddp::TensorMap eval;
  for (auto& [name, tensor] : train) {
    const auto rest = tensor.size(0) - num_rows;
    eval.emplace(name, tensor.narrow(0, rest, num_rows));
    tensor = tensor.narrow(0, 0, rest);
  }
  return eval;
}

std::shared_ptr<TensorRowsDataset> make_dataset(const ddp::TensorMap& tensors,
                                                const TensorData& data) {
  std::vector<at::Tensor> list;
  for (const auto& name : data.names) {
    list.push_back(tensors.at(name));
  }
  return std::make_shared<TensorRowsDataset>(std::move(list), data.facts);
}

TargetFacts checked_target(LossKind loss, const std::string& target, const std::string& path,
                           ddp::TensorMap& tensors) {
  const auto found = tensors.find(target);
  if (found == tensors.end()) {
    std::string names;
    for (const auto& [name, tensor] : tensors) {
      names += (names.empty() ? "" : ", ") + printable(name);
    }
    throw DataError(concat(path, " lacks the target ", printable(target), "; it has: ", names,
                           "; fix: set tensors.target to one of them"));
  }
  const auto facts = check_target(loss, found->second, path);
  if (loss == LossKind::CrossEntropy) {
    found->second = found->second.to(torch::kInt64);
  }
  return facts;
}

}  // namespace

void describe_fields(TensorFiles& f, ddp::FieldVisitor& v) {
  v.field({.name = "path",
           .doc = "Training data: a safetensors file with the model's inputs by name and the "
                  "target. Sample i is row i of each tensor.",
           .common = true},
          f.path);
  v.field({.name = "eval_path", .doc = "Evaluation data: a file of the same tensors."},
          f.eval_path);
  v.field({.name = "eval_rows",
           .doc = "Without eval_path: the last rows of `path`, which training leaves out.",
           .min = 0},
          f.eval_rows);
  v.field({.name = "target", .doc = "Name of the target."}, f.target);
}

TensorRows TensorRowsDataset::get_batch(const std::vector<int64_t>& indices) const {
  TensorRows rows{.tensors = rows_.get_batch(indices)};
  rows.num_targets = count_targets(facts_, rows.tensors.back());
  return rows;
}

TensorData open_tensors(const TensorFiles& files, LossKind loss) {
  const auto path = find_data_path(files.path), eval_path = find_data_path(files.eval_path);
  auto train = read(path);
  const auto num_rows = train.begin()->second.size(0);
  if (eval_path.empty() && (files.eval_rows == 0 || files.eval_rows >= num_rows)) {
    throw ddp::SettingsError(
        concat("tensors.eval_path is empty and tensors.eval_rows=", files.eval_rows, " of ",
               num_rows, " rows; fix: set eval_path, or eval_rows to 1 to ", num_rows - 1));
  }
  auto eval = eval_path.empty() ? take_last_rows(train, files.eval_rows) : read(eval_path);
  require_same_tensors(train, eval, eval_path.empty() ? path : eval_path);
  TensorData data;
  data.loss = loss;
  if (loss != LossKind::InGraph) {
    data.facts = checked_target(loss, files.target, path, train);
    const auto facts =
        checked_target(loss, files.target, eval_path.empty() ? path : eval_path, eval);
    data.facts.num_classes = std::max(data.facts.num_classes, facts.num_classes);
    data.facts.has_ignored = data.facts.has_ignored || facts.has_ignored;
  }
  for (const auto& [name, tensor] : train) {
    if (loss == LossKind::InGraph || name != files.target) {
      data.names.push_back(name);
    }
  }
  if (loss != LossKind::InGraph) {
    data.names.push_back(files.target);
  }
  data.train = make_dataset(train, data);
  data.eval = make_dataset(eval, data);
  return data;
}

}  // namespace examples
