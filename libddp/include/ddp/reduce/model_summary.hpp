// SPDX-License-Identifier: Apache-2.0
// A table of a model's parameters, which `--summary` of a program logs when the model is wrapped.
#pragma once

#include <string>

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp {

/// One line for each module that has parameters of its own: name, shapes, dtype, elements, and
/// whether some or all are frozen now. Then the sums, and the memory of parameters and buffers. A
/// tensor that several modules share is listed once.
std::string model_summary(const DataParallelModel& model);

}  // namespace ddp
