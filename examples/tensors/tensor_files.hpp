// SPDX-License-Identifier: Apache-2.0
// Section tensors, and its files as data sets.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/sample_loss.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/tensor_dataset.hpp"

namespace examples {

/// Section tensors.
struct TensorFiles {
  std::string path = "";
  std::string eval_path = "";
  int64_t eval_rows = 0;
  std::string target = "target";
};
void describe_fields(TensorFiles& files, ddp::FieldVisitor& visitor);

/// Rows of files: the arguments, and the target at the end.
struct TensorRows {
  std::vector<at::Tensor> tensors;  ///< [N, …]
  int64_t num_targets = 0;          ///< count_targets()
};
inline void for_each_tensor(TensorRows& rows, const ddp::TensorVisitor& visit) {
  for (auto& tensor : rows.tensors) {
    visit(tensor);
  }
}

class TensorRowsDataset {
 public:
  TensorRowsDataset(std::vector<at::Tensor> tensors, const TargetFacts& facts)
      : rows_(std::move(tensors)), facts_(facts) {}
  int64_t size() const { return rows_.size(); }
  TensorRows get(int64_t index) const { return get_batch({index}); }
  TensorRows get_batch(const std::vector<int64_t>& indices) const;

 private:
  ddp::TensorListDataset rows_;
  TargetFacts facts_;
};

struct TensorData {
  std::shared_ptr<TensorRowsDataset> train;
  std::shared_ptr<TensorRowsDataset> eval;
  std::vector<std::string> names;  ///< of a row's tensors
  TargetFacts facts{};             ///< of both files
  LossKind loss = LossKind::CrossEntropy;
};

/// Opens both files, independent of the working folder. Without a target (model.loss=in_graph) all
/// tensors are arguments. Throws SettingsError without evaluation rows, DataError if a file lacks
/// the target, has other tensors than the first, or rows of another shape.
TensorData open_tensors(const TensorFiles& files, LossKind loss);

}  // namespace examples
