// SPDX-License-Identifier: Apache-2.0
// The files of section tensors as data sets.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/exported_settings.hpp"
#include "ddp/data/tensor_dataset.hpp"

namespace examples {

struct TensorData {
  std::shared_ptr<ddp::TensorListDataset> train;
  std::shared_ptr<ddp::TensorListDataset> eval;
  std::vector<std::string> names;  ///< of a row's tensors: the arguments, and the target at the end
  TargetFacts facts{};             ///< of both files
};

/// Opens both files, independent of the working folder. Without a target (model.loss=in_graph) all
/// tensors are arguments. Throws SettingsError without evaluation rows, DataError if a file lacks
/// the target, has other tensors than the first, or rows of another shape.
TensorData open_tensors(const TensorFiles& files, LossKind loss);

}  // namespace examples
