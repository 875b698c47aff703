// SPDX-License-Identifier: Apache-2.0
// Dense matrices of filters (conv2d.hpp), made beside the layers in front of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ddp/ops/side_task.hpp"

namespace ddp::ops {

/// While one lives, conv2d on this thread takes the dense matrices of the filters that were add()ed
/// to it instead of making them between two layers' kernels. They are made on a second stream, as
/// they are when add() is called: change no weight before the last forward that reads it. The end
/// waits, on the current stream, for those that no forward took. Results are the same bit for bit.
/// Scopes nest; the innermost one counts. Also inside a CUDA graph's capture.
class FiltersAhead {
 public:
  explicit FiltersAhead(bool enabled = true);
  ~FiltersAhead();
  FiltersAhead(const FiltersAhead&) = delete;
  FiltersAhead& operator=(const FiltersAhead&) = delete;

  /// For conv2d(x, weight, stride, padding) with x of height x width pixels, in autocast's dtype or
  /// else the weight's. Does nothing where conv2d needs no matrix there or `enabled` is false.
  void add(const at::Tensor& weight, int64_t stride, int64_t height, int64_t width);

  /// conv2d's: what this thread's innermost scope made, for the current stream; else undefined.
  static at::Tensor find(const at::Tensor& weight, int64_t stride, at::ScalarType dtype);

 private:
  struct Made {
    at::Tensor weight;
    int64_t stride;  // the images need no note: only 2x2 pixels have dense matrices
    at::ScalarType dtype;
    SideTask matrix;
    bool taken = false;
  };
  bool enabled_;
  FiltersAhead* outer_;
  std::vector<Made> made_;
};

}  // namespace ddp::ops
