// SPDX-License-Identifier: Apache-2.0
// Dense matrices of filters (ddp/ops/vision.hpp), made concurrently with earlier layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/streams/side_task.hpp"

namespace ddp::ops {

/// In this scope, conv2d on this thread uses dense matrices of the filters passed to add(), instead
/// of making them between two layers' kernels. add() makes the matrix on a side stream from the
/// weight's current values: do not change a weight before its last forward. At the end of the scope
/// the current stream waits for unused matrices. Results are the same bit for bit. Scopes nest; the
/// innermost one applies. Also works inside a CUDA graph's capture.
class FiltersAhead {
 public:
  explicit FiltersAhead(bool enabled = true);
  ~FiltersAhead();
  FiltersAhead(const FiltersAhead&) = delete;
  FiltersAhead& operator=(const FiltersAhead&) = delete;

  /// For conv2d(x, weight, stride, padding) with x of height x width pixels, in autocast's dtype,
  /// else the weight's. Does nothing if conv2d needs no matrix or `enabled` is false.
  void add(const at::Tensor& weight, int64_t stride, int64_t height, int64_t width);

  /// For conv2d: the matrix from this thread's innermost scope, ready for the current stream; else
  /// undefined.
  static at::Tensor find(const at::Tensor& weight, int64_t stride, at::ScalarType dtype);

 private:
  struct Made {
    at::Tensor weight;
    int64_t stride;  // image size is fixed: only 2x2 pixels have dense matrices
    at::ScalarType dtype;
    SideTask matrix;
    bool taken = false;
  };
  bool enabled_;
  FiltersAhead* outer_;
  std::vector<Made> made_;
};

}  // namespace ddp::ops
