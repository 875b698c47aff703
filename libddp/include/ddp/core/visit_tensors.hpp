// SPDX-License-Identifier: Apache-2.0
// How the library finds the tensors in batches and in results of forwards and captured steps.
// Supported: tensors, numbers, strings and IValues, and optionals, pairs, tuples, arrays, ranges
// and maps of them. For your own type, define next to it
//
//   void for_each_tensor(MyBatch& batch, const ddp::TensorVisitor& visit) {
//     visit(batch.images);
//     visit(batch.num_targets);  // only if a GraphedStep's lambda reads it
//   }
//
// It is found by argument-dependent lookup. The library may replace a visited tensor with a copy on
// the device or one without its autograd graph. A GraphedStep captures one graph for each
// combination of the numbers and strings in a batch.
#pragma once

#include "ddp/detail/tensor_visitor.hpp"
